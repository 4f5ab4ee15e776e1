// Logits and greedy tokens against transformers: tests/data/parity holds tiny random checkpoints
// and what transformers computed for them in fp64 (tools/parity/make_reference.py).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "backend/cpu/cpu_backend.h"
#include "io/mapped_file.h"
#include "io/safetensors.h"
#include "runtime/generate.h"

namespace replayssm {
namespace {

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
    out.push_back({values<std::int32_t>(*prompt), values<float>(*file->find("logits_" + n)),
                   values<std::int32_t>(*file->find("greedy_" + n))});
  }
  return out;
}

struct ParityCase {
  const char* name;
  double tolerance;
};

class ParityTest : public testing::TestWithParam<ParityCase> {
 protected:
  void SetUp() override {
    folder_ = std::string(RSSM_SOURCE_DIR "/tests/data/parity/") + GetParam().name;
    references_ = read_references(folder_);
    ASSERT_GE(references_.size(), 2u);
    context_ = {.threads = &threads_, .isa = supported_isas().back()};
    backend_ = std::make_shared<CpuBackend>(context_);
    auto model = load_model(folder_, *backend_);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::move(model).value();
  }

  // The reference keeps keys and values unrounded.
  std::unique_ptr<Engine> engine(DecodeMode decode, int window) {
    auto engine = Engine::create(model_, backend_, context_,
                                 {.decode = decode,
                                  .window = window,
                                  .kv = DType::kF32,
                                  .sequences = 2,
                                  .context = 256,
                                  .poison = true});
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return std::move(engine).value();
  }

  ThreadPool threads_{2};
  CpuContext context_;
  std::string folder_;
  std::vector<Reference> references_;
  std::shared_ptr<CpuBackend> backend_;
  std::shared_ptr<Model> model_;
};

void expect_close(std::span<const float> found, std::span<const float> expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_TRUE(std::abs(double(found[i]) - expected[i]) <= tolerance)
        << "logit " << i << ": " << found[i] << ", expected " << expected[i];
  }
}

TEST_P(ParityTest, PromptLogits) {
  const auto e = engine(DecodeMode::kPlain, 1);
  for (const Reference& reference : references_) {
    const auto sequence = e->open();
    ASSERT_TRUE(sequence.ok());
    const Work work{.sequence = *sequence,
                    .phase = Phase::kPrompt,
                    .tokens = reference.prompt,
                    .logits = static_cast<std::int64_t>(reference.prompt.size())};
    const auto logits = e->advance(std::span(&work, 1));
    ASSERT_TRUE(logits.ok()) << logits.status().message();
    expect_close(*logits, reference.logits, GetParam().tolerance);
    ASSERT_TRUE(e->close(*sequence).ok());
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
      const auto sequence = e->open();
      ASSERT_TRUE(sequence.ok());
      for (std::size_t t = 0; t < reference.prompt.size(); ++t) {
        const Work work{.sequence = *sequence,
                        .phase = t == 0 ? Phase::kPrompt : Phase::kDecode,
                        .tokens = std::span(reference.prompt).subspan(t, 1)};
        const auto logits = e->advance(std::span(&work, 1));
        ASSERT_TRUE(logits.ok()) << logits.status().message();
        expect_close(*logits, std::span(reference.logits).subspan(t * vocab, vocab),
                     GetParam().tolerance);
      }
      ASSERT_TRUE(e->close(*sequence).ok());
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

INSTANTIATE_TEST_SUITE_P(Checkpoints, ParityTest,
                         testing::Values(ParityCase{"nemotron-h-a", 1e-4},
                                         ParityCase{"nemotron-h-b", 1e-4},
                                         ParityCase{"nemotron-h-c", 1e-4}),
                         [](const auto& parity) {
                           std::string name = parity.param.name;
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace replayssm
