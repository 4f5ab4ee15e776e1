#include "runtime/draft/ngram_draft.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace replayssm {
namespace {

constexpr int kLongest = 16;

/// Hash of an n-gram from that of its last n - 1 tokens and the token in front of them, so that one
/// walk backwards yields the hashes of all endings.
std::uint64_t lengthen(std::uint64_t hash, std::int32_t token) {
  hash = (hash ^ (static_cast<std::uint64_t>(static_cast<std::uint32_t>(token)) + 1)) *
         0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

}  // namespace

void NgramIndex::extend(std::span<const std::int32_t> text) {
  const auto size = static_cast<std::int64_t>(text.size());
  // An n-gram enters once a token follows it: an ending must not find itself.
  for (; indexed_ < size; ++indexed_) {
    std::uint64_t hash = 0;
    for (int n = 1; n <= options_.longest && n <= indexed_; ++n) {
      hash = lengthen(hash, text[static_cast<std::size_t>(indexed_ - n)]);
      if (n >= options_.shortest) last_[hash] = indexed_;
    }
  }
}

std::vector<std::int32_t> NgramIndex::continuation(std::span<const std::int32_t> text,
                                                   std::int64_t limit) const {
  std::int64_t from = -1;
  std::uint64_t hash = 0;
  for (int n = 1; n <= options_.longest && static_cast<std::size_t>(n) <= text.size(); ++n) {
    hash = lengthen(hash, text[text.size() - static_cast<std::size_t>(n)]);
    if (n < options_.shortest) continue;
    const auto found = last_.find(hash);
    // A longer ending has occurred only where all shorter ones have.
    if (found == last_.end()) break;
    const auto end = static_cast<std::size_t>(found->second);
    const auto length = static_cast<std::size_t>(n);
    if (end < length || !std::equal(text.end() - n, text.end(),
                                    text.begin() + static_cast<std::ptrdiff_t>(end - length))) {
      break;  // two n-grams of one hash
    }
    from = found->second;
  }
  std::vector<std::int32_t> out;
  if (from < 0) return out;
  const auto size = static_cast<std::int64_t>(text.size());
  for (std::int64_t i = from; i < from + limit; ++i) {
    out.push_back(i < size ? text[static_cast<std::size_t>(i)]
                           : out[static_cast<std::size_t>(i - size)]);
  }
  return out;
}

NgramDraft::NgramDraft(const NgramOptions& options) : options_(options) {
  std::ostringstream name;
  name << "ngram";
  if (options != NgramOptions{}) name << ':' << options.shortest << '-' << options.longest;
  name_ = std::move(name).str();
}

Result<std::unique_ptr<NgramDraft>> NgramDraft::create(const NgramOptions& options) {
  if (options.shortest < 1 || options.shortest > options.longest || options.longest > kLongest) {
    return invalid_argument("n-gram drafts look at ", options.shortest, " to ", options.longest,
                            " tokens, expected 1 <= shortest <= longest <= ", kLongest);
  }
  return std::unique_ptr<NgramDraft>(new NgramDraft(options));
}

Status NgramDraft::open(std::int32_t sequence, std::span<const std::int32_t> tokens) {
  const auto [entry, added] = indexes_.try_emplace(sequence, options_);
  if (!added) return failed_precondition("sequence ", sequence, " is open for drafts already");
  entry->second.extend(tokens);
  return {};
}

Status NgramDraft::close(std::int32_t sequence) {
  if (indexes_.erase(sequence) == 1) return {};
  return failed_precondition("sequence ", sequence, " is not open for drafts");
}

Status NgramDraft::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const DraftRequest& request = requests[i];
    const auto entry = indexes_.find(request.sequence);
    if (entry == indexes_.end()) {
      return failed_precondition("sequence ", request.sequence, " is not open for drafts");
    }
    NgramIndex& index = entry->second;
    if (static_cast<std::int64_t>(request.tokens.size()) < index.size()) {
      return invalid_argument("sequence ", request.sequence, ": the text has ",
                              request.tokens.size(), " tokens, expected at least the ",
                              index.size(), " it had");
    }
    index.extend(request.tokens);
    drafts[i].tokens = index.continuation(request.tokens, request.limit);
  }
  return {};
}

}  // namespace replayssm
