#include "text/added_tokens.h"

#include <utf8proc.h>

#include <utility>

#include "text/utf8.h"

namespace replayssm {
namespace {

/// The property White_Space.
bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

/// \w of Unicode's regular expressions: Alphabetic, marks, decimal digits, connectors, joiners.
bool is_word(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      // Joiners, and the symbols that are alphabetic: circled and squared letters.
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
             (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
             (c >= 0x1F170 && c <= 0x1F189);
  }
}

std::size_t last_char(std::string_view text, std::size_t end) {
  std::size_t pos = end - 1;
  while (pos > 0 && (static_cast<unsigned char>(text[pos]) & 0xC0) == 0x80) --pos;
  return pos;
}

/// Where the white space before `end` begins, not before `limit`.
std::size_t space_begin(std::string_view text, std::size_t limit, std::size_t end) {
  while (end > limit) {
    const std::size_t pos = last_char(text, end);
    if (!is_space(read_utf8(text, pos).code)) break;
    end = pos;
  }
  return end;
}

std::size_t space_end(std::string_view text, std::size_t begin) {
  while (begin < text.size()) {
    const Utf8Char c = read_utf8(text, begin);
    if (!is_space(c.code)) break;
    begin += c.length;
  }
  return begin;
}

bool is_single_word(std::string_view text, std::size_t begin, std::size_t end) {
  if (begin > 0 && is_word(read_utf8(text, last_char(text, begin)).code)) return false;
  return end >= text.size() || !is_word(read_utf8(text, end).code);
}

}  // namespace

void AddedTokens::add(AddedToken token, std::string_view pattern) {
  const std::int32_t index = static_cast<std::int32_t>(tokens_.size());
  by_content_.emplace(token.content, tokens_.size());
  by_id_.emplace(token.id, tokens_.size());
  (token.normalized ? normalized_ : raw_).add(pattern, index);
  tokens_.push_back(std::move(token));
}

const AddedToken* AddedTokens::find(std::string_view content) const {
  const auto it = by_content_.find(std::string(content));
  return it == by_content_.end() ? nullptr : &tokens_[it->second];
}

const AddedToken* AddedTokens::find(std::int32_t id) const {
  const auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : &tokens_[it->second];
}

void AddedTokens::split(std::string_view text, Stage stage, bool parse_special,
                        std::vector<Segment>* segments) const {
  const Trie& trie = stage == Stage::kRawText ? raw_ : normalized_;
  std::size_t done = 0;  // text before it is in segments
  std::size_t pos = trie.empty() ? text.size() : 0;
  while (pos < text.size()) {
    std::size_t length = 0;
    const std::int32_t index = trie.longest(text, pos, &length);
    if (index < 0) {
      ++pos;
      continue;
    }
    const AddedToken& token = tokens_[index];
    std::size_t begin = pos;
    std::size_t end = pos + length;
    pos = end;  // also behind a match that does not count, as in Hugging Face tokenizers
    if (token.special && !parse_special) continue;
    if (token.single_word && !is_single_word(text, begin, end)) continue;
    if (begin < done) continue;  // a token's rstrip took it
    if (token.lstrip) begin = space_begin(text, done, begin);
    if (token.rstrip) end = space_end(text, end);
    if (begin > done) segments->push_back({text.substr(done, begin - done), -1});
    segments->push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) segments->push_back({text.substr(done), -1});
}

void AddedTokens::Trie::add(std::string_view pattern, std::int32_t value) {
  if (pattern.empty()) return;
  std::int32_t node = -1;
  for (const char byte : pattern) {
    std::int32_t next = child(node, byte);
    if (next < 0) {
      next = static_cast<std::int32_t>(nodes_.size());
      Node added;
      added.byte = byte;
      if (node < 0) {
        roots_[static_cast<unsigned char>(byte)] = next + 1;
      } else {
        added.sibling = nodes_[node].first_child;
        nodes_[node].first_child = next;
      }
      nodes_.push_back(added);
    }
    node = next;
  }
  if (nodes_[node].value < 0) nodes_[node].value = value;
}

std::int32_t AddedTokens::Trie::child(std::int32_t node, char byte) const {
  if (node < 0) return roots_[static_cast<unsigned char>(byte)] - 1;
  std::int32_t next = nodes_[node].first_child;
  while (next >= 0 && nodes_[next].byte != byte) next = nodes_[next].sibling;
  return next;
}

std::int32_t AddedTokens::Trie::longest(std::string_view text, std::size_t pos,
                                        std::size_t* length) const {
  std::int32_t best = -1;
  std::int32_t node = -1;
  for (std::size_t i = pos; i < text.size(); ++i) {
    node = child(node, text[i]);
    if (node < 0) break;
    if (nodes_[node].value >= 0) {
      best = nodes_[node].value;
      *length = i + 1 - pos;
    }
  }
  return best;
}

}  // namespace replayssm
