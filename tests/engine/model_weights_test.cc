// What a model makes of its files: weights that are refused, and settings that must change the
// numbers or must not.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "support/engine_harness.h"
#include "support/model_folder.h"
#include "support/model_test.h"

namespace replayssm::testing {
namespace {

const Tokens kPrompt = {3, 17, 250, 4, 4, 9, 101, 77, 12, 200, 31};

std::string base_folder() { return parity_folder("nemotron-h-a"); }

Result<std::unique_ptr<Model>> load(const std::string& folder) {
  static const LoadedModel base(base_folder());
  return load_model(folder, *base.backend);
}

/// Logits of the prompt, then of tokens decoded in place and by replay.
struct AllLogits {
  Logits prompt, plain, replay;
};

AllLogits all_logits(const std::string& folder) {
  AllLogits out;
  const LoadedModel loaded(folder);
  if (loaded.model == nullptr) return out;
  for (const DecodeMode decode : {DecodeMode::kPlain, DecodeMode::kReplay}) {
    const auto e = loaded.engine(
        {.decode = decode, .window = 4, .sequences = 1, .context = 64, .poison = true});
    if (e == nullptr) return out;
    const std::int32_t s = open_sequence(*e);
    out.prompt = prompt_step(*e, s, kPrompt);
    Logits& decoded = decode == DecodeMode::kPlain ? out.plain : out.replay;
    for (const std::int32_t token : kPrompt) {
      const Logits next = decode_step(*e, s, token);
      decoded.insert(decoded.end(), next.begin(), next.end());
    }
  }
  return out;
}

/// The largest difference, relative to the largest value.
double distance(const Logits& a, const Logits& b) {
  EXPECT_EQ(a.size(), b.size());
  EXPECT_FALSE(a.empty());
  double most = 0;
  double scale = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    most = std::max(most, std::abs(double(a[i]) - b[i]));
    scale = std::max(scale, std::abs(double(b[i])));
  }
  return most / scale;
}

void expect_same(const AllLogits& a, const AllLogits& b) {
  EXPECT_TRUE(same_bits(a.prompt, b.prompt));
  EXPECT_TRUE(same_bits(a.plain, b.plain));
  EXPECT_TRUE(same_bits(a.replay, b.replay));
}

/// The base checkpoint in a folder of its own, to change.
struct Variant {
  TempDir folder;
  Json config = read_config(base_folder());
  StoredTensors tensors = read_tensors(base_folder());

  const std::string& write() {
    folder.write("config.json", config.dump());
    write_tensors(folder, tensors);
    return folder.path();
  }
};

/// Names of layers' tensors in checkpoint a: layers 0, 2 and 5 are Mamba-2.
std::string mixer(int layer, const std::string& what) {
  return "layers." + std::to_string(layer) + ".mixer." + what;
}
constexpr int kMambaLayers[] = {0, 2, 5};

std::string prefix(const StoredTensors& tensors) {
  for (const StoredTensor& tensor : tensors) {
    const std::size_t at = tensor.name.find("layers.0.");
    if (at != std::string::npos) return tensor.name.substr(0, at);
  }
  return {};
}

// ---- C70: the clamp of dt ----

TEST(TimeStepTest, OnlyAFiniteRangeClamps) {
  const AllLogits base = all_logits(base_folder());
  const auto variant = [&](const std::string& limit) {
    const TempDir folder;
    link_files(folder, base_folder());
    Json config = read_config(base_folder());
    config.erase("time_step_limit");
    std::string text = config.dump();
    if (!limit.empty()) text.insert(1, "\"time_step_limit\": " + limit + ",");
    replace_file(folder, "config.json", text);
    return all_logits(folder.path());
  };
  for (const char* open : {"", "null", "[0.0, Infinity]", "[0, 1e308]", "[0.0, 1e+308]",
                           R"([0.0, {"__float__": "Infinity"}])"}) {
    SCOPED_TRACE(open);
    expect_same(variant(open), base);
  }
  const AllLogits clamped = variant("[0.001, 0.1]");
  EXPECT_GT(distance(clamped.prompt, base.prompt), 1e-3);
  EXPECT_GT(distance(clamped.plain, base.plain), 1e-3);
  EXPECT_GT(distance(clamped.replay, base.replay), 1e-3);
  // The clamp is the same in place and by replay.
  EXPECT_LT(distance(clamped.replay, clamped.plain), 1e-5);
}

/// dt of 1e-17 stays 1e-17: its state never matters, as with B = 0. A hidden lower clamp of 0.001
/// would show; asked for, it does.
TEST(TimeStepTest, TinyStepsAreNotRaised) {
  const auto quiet = [](Variant& v) {
    const std::string body = prefix(v.tensors);
    for (const int layer : kMambaLayers) {
      StoredTensor& bias = tensor_named(v.tensors, body + mixer(layer, "dt_bias"));
      for (std::size_t i = 0; i < bias.count(); ++i) bias.set(i, -40.0f);
    }
  };
  Variant tiny;
  quiet(tiny);
  const AllLogits found = all_logits(tiny.write());

  Variant without_b;  // convolution channels x 32 | B 32 | C 32
  quiet(without_b);
  const std::string body = prefix(without_b.tensors);
  for (const int layer : kMambaLayers) {
    StoredTensor& weight = tensor_named(without_b.tensors, body + mixer(layer, "conv1d.weight"));
    StoredTensor& bias = tensor_named(without_b.tensors, body + mixer(layer, "conv1d.bias"));
    ASSERT_EQ(bias.count(), 96u);
    for (std::size_t i = 32; i < 64; ++i) {
      bias.set(i, 0.0f);
      for (std::size_t k = 0; k < 4; ++k) weight.set(4 * i + k, 0.0f);
    }
  }
  const AllLogits want = all_logits(without_b.write());
  EXPECT_LT(distance(found.prompt, want.prompt), 1e-6);
  EXPECT_LT(distance(found.plain, want.plain), 1e-6);
  EXPECT_LT(distance(found.replay, want.replay), 1e-6);

  tiny.config["time_step_limit"] = {0.001, 1e308};
  const AllLogits raised = all_logits(tiny.write());
  EXPECT_GT(distance(raised.prompt, want.prompt), 1e-5);
  EXPECT_GT(distance(raised.plain, want.plain), 1e-5);
  EXPECT_GT(distance(raised.replay, want.replay), 1e-5);
}

// ---- C77: padding ----

class PaddingTest : public ModelTest {};

INSTANTIATE_TEST_SUITE_P(Models, PaddingTest, ::testing::Values("nemotron-h-a", kRandomQwen35),
                         parameter_name);

/// Pad tokens before, between and behind rows, full of junk: logits and state are those of the
/// prompt alone.
TEST_P(PaddingTest, PadsNeverAdvanceAnything) {
  const LoadedModel& loaded = PaddingTest::loaded();
  const auto vocab = loaded.model->description().vocab_size;
  const auto run = [&](std::int64_t left, std::int64_t right, RowKind pad_kind, bool pad_prompt) {
    EngineOptions options{.decode = DecodeMode::kReplay,
                          .window = 4,
                          .draft_capacity = 4,
                          .sequences = 2,
                          .context = 64,
                          .poison = true};
    auto pool = StatePool::create(pool_options(loaded.model->description(), options));
    auto cache = KvCache::create(kv_options(loaded.model->description(), options));
    EXPECT_TRUE(is_ok(pool) && is_ok(cache));
    EXPECT_TRUE(is_ok(loaded.model->bind(*pool)));
    const auto slot = pool->acquire();
    EXPECT_TRUE(is_ok(slot));
    Logits out;
    // The prompt, then three tokens by replay, each with pads around it.
    std::vector<Tokens> parts{kPrompt, {5}, {6}, {7}};
    std::int64_t position = 0;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const RowKind kind = p == 0 ? RowKind::kCommitted : RowKind::kTentative;
      const auto count = static_cast<std::int64_t>(parts[p].size());
      Tokens tokens(static_cast<std::size_t>(left), 0);
      tokens.insert(tokens.end(), parts[p].begin(), parts[p].end());
      tokens.insert(tokens.end(), static_cast<std::size_t>(right), 0);
      std::vector<StepRow> step_rows;
      std::vector<ForwardRow> rows;
      std::vector<std::int64_t> logit_counts;
      std::vector<std::int64_t> accepted;
      const auto add = [&](std::int32_t s, RowKind k, bool prompt, std::int64_t begin,
                           std::int64_t n, std::int64_t at, std::int64_t logits) {
        if (n == 0) return;
        StepRow row;
        row.slot = s;
        row.kind = k;
        row.token_begin = begin;
        row.token_count = n;
        step_rows.push_back(row);
        rows.push_back(
            {.slot = s, .kind = k, .prompt = prompt, .begin = begin, .count = n, .position = at});
        logit_counts.push_back(logits);
        accepted.push_back(s < 0 ? 0 : n);
      };
      add(-1, pad_kind, pad_prompt, 0, left, 0, 0);
      add(*slot, kind, p == 0, left, count, position, count);
      add(-1, pad_kind, pad_prompt, left + count, right, 0, 0);
      auto step = pool->begin_step(step_rows);
      EXPECT_TRUE(is_ok(step));
      if (!step.ok()) return out;
      Logits logits(static_cast<std::size_t>(count * vocab));
      EXPECT_TRUE(is_ok(loaded.model->forward(
          *loaded.backend, *pool, *step, *cache,
          {.rows = rows, .tokens = tokens, .logit_counts = logit_counts},
          {.logits = TensorView::contiguous(logits.data(), DType::kF32, {count, vocab}),
           .hidden = {}})));
      EXPECT_TRUE(is_ok(pool->commit(*step, accepted)));
      out.insert(out.end(), logits.begin(), logits.end());
      position += count;
    }
    const auto image = pool->save(*slot);
    EXPECT_TRUE(is_ok(image));
    if (image.ok()) {  // the state itself, as numbers that compare bit for bit
      for (const std::byte b : *image) out.push_back(static_cast<float>(b));
    }
    return out;
  };
  const Logits alone = run(0, 0, RowKind::kTentative, false);
  ASSERT_FALSE(alone.empty());
  for (const auto& [left, right] : {std::pair{3, 0}, {0, 3}, {3, 3}, {1, 2}}) {
    for (const RowKind kind : {RowKind::kTentative, RowKind::kCommitted}) {
      for (const bool prompt : {false, true}) {
        EXPECT_TRUE(same_bits(run(left, right, kind, prompt), alone))
            << left << " pads before, " << right << " behind, " << to_string(kind)
            << (prompt ? ", prompt" : "");
      }
    }
  }
}

// ---- C86: groups of the gated norm ----

/// Two groups with equal B and C compute what one group does, except for the norm: it is over each
/// group's channels, never over all of them.
TEST(GatedNormTest, GroupsMatter) {
  Variant two;
  const std::string body = prefix(two.tensors);
  // in_proj rows: z 32 | x 32 | B 2 x 16 | C 2 x 16 | dt 4, of 32 columns each.
  const auto copy_group = [&](StoredTensor& t, std::size_t row, std::size_t columns) {
    for (std::size_t i = 0; i < 16 * columns; ++i) {
      t.set((row + 16) * columns + i, t.at(row * columns + i));
    }
  };
  for (const int layer : kMambaLayers) {
    StoredTensor& in = tensor_named(two.tensors, body + mixer(layer, "in_proj.weight"));
    ASSERT_EQ(in.shape, (std::vector<std::int64_t>{132, 32}));
    for (const std::size_t row : {64u, 96u}) copy_group(in, row, 32);
    for (const std::size_t row : {32u, 64u}) {
      copy_group(tensor_named(two.tensors, body + mixer(layer, "conv1d.weight")), row, 4);
      copy_group(tensor_named(two.tensors, body + mixer(layer, "conv1d.bias")), row, 1);
    }
  }
  Variant one;
  one.tensors = two.tensors;
  one.config["n_groups"] = 1;
  const auto drop_group = [](StoredTensor& t, std::size_t row, std::size_t columns) {
    t.bytes.erase((row + 16) * columns * sizeof(float), 16 * columns * sizeof(float));
    t.shape[0] -= 16;
  };
  for (const int layer : kMambaLayers) {
    StoredTensor& in = tensor_named(one.tensors, body + mixer(layer, "in_proj.weight"));
    for (const std::size_t row : {96u, 64u}) drop_group(in, row, 32);
    for (const std::size_t row : {64u, 32u}) {
      drop_group(tensor_named(one.tensors, body + mixer(layer, "conv1d.weight")), row, 4);
      drop_group(tensor_named(one.tensors, body + mixer(layer, "conv1d.bias")), row, 1);
    }
  }
  const AllLogits grouped = all_logits(two.write());
  const AllLogits whole = all_logits(one.write());
  EXPECT_GT(distance(grouped.prompt, whole.prompt), 1e-3);
  EXPECT_GT(distance(grouped.replay, whole.replay), 1e-3);

  // The same two with norms that do not see the difference: y * silu(z) of equal size in both
  // groups. Heads 2, 3 become copies of heads 0, 1, so that both groups hold the same channels.
  for (Variant* v : {&two, &one}) {
    const std::size_t groups = v == &two ? 2 : 1;
    for (const int layer : kMambaLayers) {
      const auto repeat = [&](const std::string& what, std::size_t first, std::size_t half,
                              std::size_t columns) {
        StoredTensor& t = tensor_named(v->tensors, body + mixer(layer, what));
        for (std::size_t i = 0; i < half * columns; ++i) {
          t.set((first + half) * columns + i, t.at(first * columns + i));
        }
      };
      repeat("in_proj.weight", 0, 16, 32);
      repeat("in_proj.weight", 32, 16, 32);
      repeat("in_proj.weight", 64 + 2 * 16 * groups, 2, 32);
      repeat("conv1d.weight", 0, 16, 4);
      repeat("conv1d.bias", 0, 16, 1);
      repeat("A_log", 0, 2, 1);
      repeat("D", 0, 2, 1);
      repeat("dt_bias", 0, 2, 1);
    }
  }
  EXPECT_LT(distance(all_logits(two.write()).prompt, all_logits(one.write()).prompt), 1e-6);
}

// ---- C88: checkpoints that are not what the configuration describes ----

TEST(WeightsTest, EveryTensorIsNeeded) {
  const StoredTensors tensors = read_tensors(base_folder());
  ASSERT_GT(tensors.size(), 40u);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Variant v;
    v.tensors.erase(v.tensors.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_TRUE(refused(load(v.write()), StatusCode::kNotFound, {tensors[i].name, "missing", "["}));
  }
}

TEST(WeightsTest, EveryShapeIsChecked) {
  const StoredTensors tensors = read_tensors(base_folder());
  const auto text = [](const std::vector<std::int64_t>& shape) {
    std::string out = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) {
      out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    }
    return out + "]";
  };
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::vector<std::int64_t>& shape = tensors[i].shape;
    std::vector<std::vector<std::int64_t>> wrong;
    wrong.push_back(shape);  // the same bytes, one dimension more: (H) as (H, 1)
    wrong.back().push_back(1);
    wrong.push_back(shape);  // transposed
    std::reverse(wrong.back().begin(), wrong.back().end());
    if (shape.size() == 3) wrong.push_back({shape[0], shape[2]});  // squeezed, as GGUF does
    for (const auto& other : wrong) {
      if (other == shape) continue;
      Variant v;
      v.tensors[i].shape = other;
      EXPECT_TRUE(refused(load(v.write()), StatusCode::kInvalidArgument,
                          {tensors[i].name, text(shape), text(other)}));
    }
    // A row more and a row less.
    Variant v;
    const std::size_t row = v.tensors[i].bytes.size() / static_cast<std::size_t>(shape[0]);
    v.tensors[i].bytes.resize(v.tensors[i].bytes.size() - row);
    v.tensors[i].shape[0] -= 1;
    EXPECT_TRUE(refused(load(v.write()), StatusCode::kInvalidArgument,
                        {tensors[i].name, text(shape), text(v.tensors[i].shape)}));
    v.tensors[i].bytes.resize(v.tensors[i].bytes.size() + 2 * row);
    v.tensors[i].shape[0] += 2;
    EXPECT_TRUE(refused(load(v.write()), StatusCode::kInvalidArgument,
                        {tensors[i].name, text(shape), text(v.tensors[i].shape)}));
  }
}

TEST(WeightsTest, TensorsNobodyAskedForAreRefused) {
  const std::string body = prefix(read_tensors(base_folder()));
  for (const std::string& name :
       {body + "layers.0.mixer.in_proj.bias", body + "layers.7.norm.weight",
        body + "layers.0.mixer.in_proj.weight_scale", std::string("mtp.layers.0.norm.weight"),
        std::string("unrelated"), body + "layers.1.mixer.gate.weight"}) {
    Variant v;
    v.tensors.push_back({name, "F32", {4}, std::string(16, '\0')});
    EXPECT_TRUE(refused(load(v.write()), StatusCode::kInvalidArgument, {name, "[4]"}));
  }
  // Draft layers that the configuration announces are known, and not run.
  Variant v;
  v.config["num_nextn_predict_layers"] = 1;
  v.tensors.push_back({"mtp.layers.0.norm.weight", "F32", {4}, std::string(16, '\0')});
  EXPECT_TRUE(is_ok(load(v.write())));
}

TEST(WeightsTest, TypesNobodyCanMultiplyAreRefused) {
  for (const auto& [type, size] : {std::pair{"I32", 4}, {"F64", 8}, {"F8_E4M3", 1}, {"BOOL", 1}}) {
    for (const char* what : {"in_proj.weight", "A_log", "conv1d.weight"}) {
      Variant v;
      StoredTensor& t = tensor_named(v.tensors, prefix(v.tensors) + mixer(0, what));
      t.bytes.assign(t.count() * static_cast<std::size_t>(size), '\0');
      t.dtype = type;
      EXPECT_TRUE(refused(load(v.write()), StatusCode::kUnsupported, {t.name, type}));
    }
  }
}

/// Both spellings of the body's prefix, and an output head that is the embeddings.
TEST(WeightsTest, SpellingsOfTheSameModel) {
  const AllLogits base = all_logits(base_folder());
  const std::string body = prefix(read_tensors(base_folder()));
  for (const std::string& other : {std::string("backbone."), std::string("model.")}) {
    Variant v;
    for (StoredTensor& t : v.tensors) {
      if (t.name.starts_with(body)) t.name = other + t.name.substr(body.size());
    }
    expect_same(all_logits(v.write()), base);
  }
  Variant half;  // a mix is neither
  tensor_named(half.tensors, body + "layers.2.norm.weight").name =
      (body == "model." ? "backbone." : "model.") + std::string("layers.2.norm.weight");
  EXPECT_FALSE(load(half.write()).ok());

  Variant tied;
  tied.config["tie_word_embeddings"] = true;
  std::erase_if(tied.tensors, [](const StoredTensor& t) { return t.name == "lm_head.weight"; });
  Variant untied;
  tensor_named(untied.tensors, "lm_head.weight").bytes =
      tensor_named(untied.tensors, body + "embeddings.weight").bytes;
  expect_same(all_logits(tied.write()), all_logits(untied.write()));
}

/// Weights whose head h is different in one way only: each head is found where it belongs.
TEST(WeightsTest, HeadsKeepTheirPlaces) {
  const AllLogits base = all_logits(base_folder());
  const std::string body = prefix(read_tensors(base_folder()));
  // Swapping two heads of every per-head tensor and the columns that read them changes nothing but
  // the order of additions. Heads 0 and 1 share group 0.
  Variant v;
  const auto swap_rows = [&](StoredTensor& t, std::size_t a, std::size_t b, std::size_t rows,
                             std::size_t columns) {
    for (std::size_t i = 0; i < rows * columns; ++i) {
      const float kept = t.at(a * columns + i);
      t.set(a * columns + i, t.at(b * columns + i));
      t.set(b * columns + i, kept);
    }
  };
  for (const int layer : kMambaLayers) {
    const auto tensor = [&](const char* what) -> StoredTensor& {
      return tensor_named(v.tensors, body + mixer(layer, what));
    };
    swap_rows(tensor("in_proj.weight"), 0, 8, 8, 32);      // z
    swap_rows(tensor("in_proj.weight"), 32, 40, 8, 32);    // x
    swap_rows(tensor("in_proj.weight"), 128, 129, 1, 32);  // dt
    swap_rows(tensor("conv1d.weight"), 0, 8, 8, 4);
    swap_rows(tensor("conv1d.bias"), 0, 8, 8, 1);
    swap_rows(tensor("norm.weight"), 0, 8, 8, 1);
    for (const char* per_head : {"A_log", "D", "dt_bias"}) swap_rows(tensor(per_head), 0, 1, 1, 1);
    StoredTensor& out = tensor("out_proj.weight");
    ASSERT_EQ(out.shape, (std::vector<std::int64_t>{32, 32}));
    for (std::size_t row = 0; row < 32; ++row) {
      for (std::size_t i = 0; i < 8; ++i) {
        const float kept = out.at(row * 32 + i);
        out.set(row * 32 + i, out.at(row * 32 + 8 + i));
        out.set(row * 32 + 8 + i, kept);
      }
    }
  }
  const AllLogits swapped = all_logits(v.write());
  EXPECT_LT(distance(swapped.prompt, base.prompt), 2e-6);
  EXPECT_LT(distance(swapped.replay, base.replay), 2e-6);
  // Any one of them left behind shows.
  for (const char* what : {"A_log", "D", "dt_bias"}) {
    Variant wrong;
    wrong.tensors = v.tensors;
    swap_rows(tensor_named(wrong.tensors, body + mixer(0, what)), 0, 1, 1, 1);
    EXPECT_GT(distance(all_logits(wrong.write()).plain, base.plain), 2e-6) << what;
  }
}

TEST(WeightsTest, TruncatedFilesAreRefused) {
  Variant v;
  v.write();
  const std::string whole = read_text(v.folder / "model.safetensors");
  for (std::size_t size = 0; size < whole.size(); size += size < 4096 ? 97 : 9973) {
    v.folder.write("model.safetensors", whole.substr(0, size));
    const auto model = load(v.folder.path());
    ASSERT_FALSE(model.ok()) << size << " bytes";
    EXPECT_NE(model.status().message().find("model.safetensors"), std::string::npos);
  }
}

}  // namespace
}  // namespace replayssm::testing
