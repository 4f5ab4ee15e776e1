// Tests that hold for models of every architecture, by the model's name.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "runtime/draft/mtp_draft.h"
#include "support/engine_harness.h"
#include "support/qwen3_5_model.h"

namespace replayssm::testing {

inline constexpr const char* kRandomQwen35 = "random-qwen3_5";

/// The folder of a test's model: a checkpoint of tests/data/parity, or kRandomQwen35, which is
/// written once per process.
inline std::string model_folder(const std::string& name) {
  if (name != kRandomQwen35) return parity_folder(name);
  static const TempDir* const folder = [] {
    static const TempDir made;
    write_qwen3_5(made);
    return &made;
  }();
  return folder->path();
}

/// Parameter: a name for model_folder.
class ModelTest : public ::testing::TestWithParam<const char*> {
 protected:
  static const LoadedModel& loaded(int threads = 1) {
    static std::map<std::pair<std::string, int>, std::unique_ptr<LoadedModel>> models;
    auto& model = models[{GetParam(), threads}];
    if (model == nullptr) model = std::make_unique<LoadedModel>(model_folder(GetParam()), threads);
    return *model;
  }
  static std::int64_t vocab() { return loaded().model->description().vocab_size; }

  /// The model's own head as a source of drafts; null where it has none.
  static std::unique_ptr<DraftSource> mtp_source(int drafts, std::int64_t context = 512) {
    auto head = loaded().model->load_mtp_head(*loaded().backend);
    if (!head.ok()) return nullptr;
    auto source = MtpDraft::create(std::move(head).value(), loaded().backend,
                                   {.draft_tokens = drafts, .context = context});
    EXPECT_TRUE(is_ok(source));
    return source.ok() ? std::move(source).value() : nullptr;
  }
};

}  // namespace replayssm::testing
