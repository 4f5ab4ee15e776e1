// Logits and greedy tokens against transformers: tests/data/parity holds tiny random checkpoints
// and what transformers computed for them in fp64 (tools/parity/make_reference.py). Checkpoints
// with a multi-token-prediction head, which transformers leaves out, have its logits and drafts
// too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "io/mapped_file.h"
#include "io/safetensors.h"
#include "runtime/draft/mtp_draft.h"
#include "runtime/generate.h"
#include "support/engine_harness.h"

namespace replayssm::testing {
namespace {

/// Logits are of order 1 to 10.
constexpr float kTolerance = 1e-4f;

template <typename T>
std::vector<T> values(const TensorInfo& tensor) {
  std::vector<T> out(tensor.data.size() / sizeof(T));
  std::memcpy(out.data(), tensor.data.data(), out.size() * sizeof(T));
  return out;
}

struct Reference {
  std::vector<std::int32_t> prompt;
  std::vector<float> logits;  // (prompt, vocab)
  std::vector<std::int32_t> greedy;
  std::vector<std::int32_t> mtp_drafts;  // after the prompt and the first greedy token
  std::vector<float> mtp_logits;         // (mtp_drafts, vocab)
};

std::vector<Reference> read_references(const std::string& folder) {
  std::vector<Reference> out;
  auto mapped = MappedFile::open(folder + "/reference.safetensors");
  EXPECT_TRUE(mapped.ok()) << mapped.status().message();
  auto file = parse_safetensors(mapped->bytes(), "reference.safetensors");
  EXPECT_TRUE(file.ok()) << file.status().message();
  for (int i = 0;; ++i) {
    const std::string n = std::to_string(i);
    const TensorInfo* prompt = file->find("prompt_" + n);
    if (prompt == nullptr) break;
    out.push_back({values<std::int32_t>(*prompt),
                   values<float>(*file->find("logits_" + n)),
                   values<std::int32_t>(*file->find("greedy_" + n)),
                   {},
                   {}});
    const TensorInfo* drafts = file->find("mtp_tokens_" + n);
    if (drafts == nullptr) continue;
    out.back().mtp_drafts = values<std::int32_t>(*drafts);
    out.back().mtp_logits = values<float>(*file->find("mtp_logits_" + n));
  }
  return out;
}

std::vector<std::string> checkpoints() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(parity_folder(""))) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class ParityTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    references_ = read_references(parity_folder(GetParam()));
    ASSERT_GE(references_.size(), 2u);
    ASSERT_NE(loaded_.model, nullptr);
  }

  // The reference keeps keys and values unrounded.
  std::unique_ptr<Engine> engine(DecodeMode decode, int window) {
    return loaded_.engine({.decode = decode,
                           .window = window,
                           .kv = DType::kF32,
                           .sequences = 2,
                           .context = 256,
                           .hidden_states = true,
                           .poison = true});
  }

  LoadedModel loaded_{parity_folder(GetParam()), 2};
  std::vector<Reference> references_;
};

TEST_P(ParityTest, PromptLogits) {
  const auto e = engine(DecodeMode::kPlain, 1);
  for (const Reference& reference : references_) {
    const std::int32_t sequence = open_sequence(*e);
    EXPECT_TRUE(near(prompt_step(*e, sequence, reference.prompt), reference.logits, kTolerance));
    ASSERT_TRUE(is_ok(e->close(sequence)));
  }
}

/// The same logits token by token, after a prompt of one token: in place and by replay.
TEST_P(ParityTest, DecodeLogits) {
  for (const auto& [mode, window] : {std::pair{DecodeMode::kPlain, 1},
                                     {DecodeMode::kReplay, 1},
                                     {DecodeMode::kReplay, 4},
                                     {DecodeMode::kReplay, 16}}) {
    const auto e = engine(mode, window);
    const auto vocab = static_cast<std::size_t>(e->model().vocab_size);
    for (const Reference& reference : references_) {
      const std::int32_t sequence = open_sequence(*e);
      for (std::size_t t = 0; t < reference.prompt.size(); ++t) {
        const Logits logits = advance(*e, {{.sequence = sequence,
                                            .phase = t == 0 ? Phase::kPrompt : Phase::kDecode,
                                            .tokens = std::span(reference.prompt).subspan(t, 1)}});
        ASSERT_TRUE(near(logits, std::span(reference.logits).subspan(t * vocab, vocab), kTolerance))
            << "token " << t;
      }
      ASSERT_TRUE(is_ok(e->close(sequence)));
    }
  }
}

TEST_P(ParityTest, GreedyTokens) {
  for (const auto& [mode, window] :
       {std::pair{DecodeMode::kPlain, 1}, {DecodeMode::kReplay, 4}, {DecodeMode::kReplay, 16}}) {
    const auto e = engine(mode, window);
    for (const Reference& reference : references_) {
      GenerateOptions options;
      options.max_tokens = static_cast<std::int64_t>(reference.greedy.size());
      const auto generation = generate(*e, reference.prompt, options,
                                       [](std::int32_t) -> Result<bool> { return true; });
      ASSERT_TRUE(generation.ok()) << generation.status().message();
      EXPECT_EQ(generation->tokens, reference.greedy);
    }
  }
}

class MtpParityTest : public ParityTest {};

/// Logits of the head for drafts that are chained on its own output after a prompt.
TEST_P(MtpParityTest, Logits) {
  const auto head = loaded_.model->load_mtp_head(*loaded_.backend);
  ASSERT_TRUE(is_ok(head));
  const ModelDescription& d = (*head)->description();
  const auto e = engine(DecodeMode::kPlain, 1);
  for (const Reference& reference : references_) {
    const std::int32_t sequence = open_sequence(*e);
    const Logits logits = prompt_step(*e, sequence, reference.prompt);
    std::vector<float> hidden(e->hidden_states().begin(), e->hidden_states().end());
    ASSERT_TRUE(is_ok(e->close(sequence)));
    const auto vocab = static_cast<std::size_t>(d.vocab_size);
    Tokens after(reference.prompt.begin() + 1, reference.prompt.end());
    after.push_back(argmax(std::span(logits).last(vocab)));
    ASSERT_EQ(after.back(), reference.greedy[0]);
    auto cache = KvCache::create({.layers = 1,
                                  .slots = 1,
                                  .capacity = 256,
                                  .kv_heads = d.kv_heads,
                                  .head_dim = d.kv_head_dim});
    ASSERT_TRUE(is_ok(cache));
    std::int64_t place = 0;
    for (std::size_t depth = 0; depth < reference.mtp_drafts.size(); ++depth) {
      const std::int64_t count = std::ssize(after);
      const std::int64_t one = 1;
      const ForwardRow row{
          .slot = 0, .prompt = depth == 0, .begin = 0, .count = count, .position = place};
      std::vector<float> out(hidden.size());
      Logits found(vocab);
      ASSERT_TRUE(is_ok((*head)->forward(
          *loaded_.backend, *cache,
          {.rows = std::span(&row, 1), .tokens = after, .logit_counts = std::span(&one, 1)},
          TensorView::contiguous(hidden.data(), DType::kF32, {count, d.hidden_size}),
          {.logits = TensorView::contiguous(found.data(), DType::kF32, {1, d.vocab_size}),
           .hidden = TensorView::contiguous(out.data(), DType::kF32, {count, d.hidden_size})})));
      ASSERT_TRUE(
          near(found, std::span(reference.mtp_logits).subspan(depth * vocab, vocab), kTolerance))
          << "depth " << depth;
      place += count;
      hidden.assign(out.end() - d.hidden_size, out.end());
      after = {reference.mtp_drafts[depth]};
    }
  }
}

/// The same drafts from the source, which is told hidden states as prompts and decoding make them.
TEST_P(MtpParityTest, Drafts) {
  auto head = loaded_.model->load_mtp_head(*loaded_.backend);
  ASSERT_TRUE(is_ok(head));
  const auto source =
      MtpDraft::create(std::move(head).value(), loaded_.backend,
                       {.draft_tokens = kMaxDraftTokens, .context = 256, .kv = DType::kF32});
  ASSERT_TRUE(is_ok(source));
  for (const DecodeMode mode : {DecodeMode::kPlain, DecodeMode::kReplay}) {
    const auto e = engine(mode, 8);
    for (const Reference& reference : references_) {
      for (const std::size_t prompt : {std::size_t{1}, reference.prompt.size()}) {
        const std::int32_t sequence = open_sequence(*e);
        Tokens text = reference.prompt;
        ASSERT_TRUE(is_ok((*source)->open(sequence, std::span(text).first(prompt))));
        for (std::size_t at = 0; at < text.size();) {
          const std::size_t count = at == 0 ? prompt : 1;
          advance(*e, {{.sequence = sequence,
                        .phase = at == 0 ? Phase::kPrompt : Phase::kDecode,
                        .tokens = std::span(text).subspan(at, count)}});
          ASSERT_TRUE(
              is_ok((*source)->read(sequence, static_cast<std::int64_t>(at), e->hidden_states())));
          at += count;
        }
        text.push_back(reference.greedy[0]);
        Sampler sampler{SamplingOptions{}};
        std::vector<Draft> drafts(1);
        ASSERT_TRUE(is_ok((*source)->draft(
            std::vector<DraftRequest>{{sequence, text, std::ssize(reference.mtp_drafts), &sampler}},
            drafts)));
        EXPECT_EQ(drafts[0].tokens, reference.mtp_drafts) << "prompt of " << prompt;
        ASSERT_TRUE(is_ok((*source)->close(sequence)));
        ASSERT_TRUE(is_ok(e->close(sequence)));
      }
    }
  }
}

std::vector<std::string> checkpoints_with_head() {
  std::vector<std::string> names = checkpoints();
  std::erase_if(names, [](const std::string& name) {
    return read_references(parity_folder(name)).front().mtp_drafts.empty();
  });
  return names;
}

std::string name_of(const ::testing::TestParamInfo<std::string>& parity) {
  std::string name = parity.param;
  std::erase(name, '-');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, ParityTest, ::testing::ValuesIn(checkpoints()), name_of);
INSTANTIATE_TEST_SUITE_P(Checkpoints, MtpParityTest, ::testing::ValuesIn(checkpoints_with_head()),
                         name_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MtpParityTest);

}  // namespace
}  // namespace replayssm::testing
