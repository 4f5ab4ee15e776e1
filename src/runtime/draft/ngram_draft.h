// Drafts from the text itself: what followed the last time it ended like this (prompt look-up).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/draft/draft_source.h"

namespace replayssm {

struct NgramOptions {
  int shortest = 2;  // tokens of the ending that must have occurred before
  int longest = 5;   // tokens looked at; longer matches are preferred

  friend bool operator==(const NgramOptions&, const NgramOptions&) = default;
};

/// The last place of every n-gram of a text, shortest <= n <= longest. Appending a token and a
/// look-up cost O(longest), whatever the length of the text.
class NgramIndex {
 public:
  explicit NgramIndex(const NgramOptions& options) : options_(options) {}

  /// Takes in the rest of `text`, whose beginning it has seen.
  void extend(std::span<const std::int32_t> text);

  /// Up to `limit` tokens that followed the latest earlier occurrence of the longest ending of
  /// `text`, which has been taken in. An occurrence that overlaps the ending is continued
  /// periodically. Empty where no ending of `shortest` tokens has occurred before.
  std::vector<std::int32_t> continuation(std::span<const std::int32_t> text,
                                         std::int64_t limit) const;

  std::int64_t size() const { return indexed_; }

 private:
  NgramOptions options_;
  std::int64_t indexed_ = 0;
  std::unordered_map<std::uint64_t, std::int64_t> last_;  // n-gram's hash -> its end, exclusive
};

class NgramDraft final : public DraftSource {
 public:
  /// Refuses ranges other than 1 <= shortest <= longest <= 16.
  static Result<std::unique_ptr<NgramDraft>> create(const NgramOptions& options);

  const std::string& name() const override { return name_; }
  Status open(std::int32_t sequence, std::span<const std::int32_t> tokens) override;
  Status close(std::int32_t sequence) override;
  Status draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;

 private:
  explicit NgramDraft(const NgramOptions& options);

  NgramOptions options_;
  std::string name_;  // "ngram", or "ngram:1-3" for another range
  std::unordered_map<std::int32_t, NgramIndex> indexes_;  // by sequence
};

}  // namespace replayssm
