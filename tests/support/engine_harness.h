// A loaded model and short ways to drive engines with it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "replayssm/cpu.h"
#include "runtime/engine.h"
#include "support/compare.h"

namespace replayssm::testing {

using Tokens = std::vector<std::int32_t>;
using Logits = std::vector<float>;

inline std::string parity_folder(const std::string& name) {
  return std::string(RSSM_SOURCE_DIR "/tests/data/parity/") + name;
}

struct LoadedModel {
  std::unique_ptr<ThreadPool> threads;
  CpuContext context;
  std::shared_ptr<CpuBackend> backend;
  std::shared_ptr<Model> model;

  explicit LoadedModel(const std::string& folder, int thread_count = 1)
      : threads(std::make_unique<ThreadPool>(thread_count)) {
    context = {.threads = threads.get(), .isa = supported_isas().back()};
    backend = std::make_shared<CpuBackend>(context);
    auto loaded = load_model(folder, *backend);
    EXPECT_TRUE(is_ok(loaded)) << folder;
    if (loaded.ok()) model = std::move(loaded).value();
  }

  /// An engine that must come up; its open() takes sequences in ascending order.
  std::unique_ptr<Engine> engine(const EngineOptions& options) const {
    auto engine = Engine::create(model, backend, context, options);
    EXPECT_TRUE(is_ok(engine));
    return engine.ok() ? std::move(engine).value() : nullptr;
  }
};

inline std::int32_t open_sequence(Engine& engine) {
  const auto sequence = engine.open();
  EXPECT_TRUE(is_ok(sequence));
  return sequence.ok() ? *sequence : -1;
}

/// advance(), its logits copied; empty after a failure, which is reported.
inline Logits advance(Engine& engine, const std::vector<Work>& work) {
  const auto logits = engine.advance(work);
  EXPECT_TRUE(is_ok(logits));
  return logits.ok() ? Logits(logits->begin(), logits->end()) : Logits{};
}

inline Logits run_step(Engine& engine, const std::vector<Work>& work) {
  const auto logits = engine.run(work);
  EXPECT_TRUE(is_ok(logits));
  return logits.ok() ? Logits(logits->begin(), logits->end()) : Logits{};
}

/// Logits of all tokens of a prompt in one step.
inline Logits prompt_step(Engine& engine, std::int32_t sequence,
                          std::span<const std::int32_t> tokens) {
  return advance(engine, {{.sequence = sequence,
                           .phase = Phase::kPrompt,
                           .tokens = tokens,
                           .logits = static_cast<std::int64_t>(tokens.size())}});
}

inline Logits decode_step(Engine& engine, std::int32_t sequence, std::int32_t token) {
  return advance(engine,
                 {{.sequence = sequence, .phase = Phase::kDecode, .tokens = std::span(&token, 1)}});
}

inline std::int32_t argmax(std::span<const float> logits) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < logits.size(); ++i) {
    if (logits[i] > logits[best]) best = i;
  }
  return static_cast<std::int32_t>(best);
}

/// Every value finite and within `bound` of the other's.
inline ::testing::AssertionResult near(std::span<const float> got, std::span<const float> want,
                                       float bound) {
  if (got.size() != want.size()) {
    return ::testing::AssertionFailure()
           << got.size() << " values, expected " << want.size() << " values";
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!(std::abs(got[i] - want[i]) <= bound)) {
      return ::testing::AssertionFailure()
             << "at " << i << ": found " << got[i] << ", expected " << want[i] << " +- " << bound;
    }
  }
  return ::testing::AssertionSuccess();
}

/// A test's name from a parameter that is a checkpoint's.
inline std::string parameter_name(const ::testing::TestParamInfo<const char*>& test) {
  std::string name = test.param;
  std::erase(name, '-');
  return name;
}

}  // namespace replayssm::testing
