// Tokenizer: text to token ids and back, from a Hugging Face tokenizer.json (byte-level BPE).
//
//   RSSM_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::load("model/tokenizer.json"));
//   RSSM_ASSIGN_OR_RETURN(std::vector<std::int32_t> ids, tokenizer.encode("Hello", true));
//
// Ids are those of the Hugging Face `tokenizers` library. What a file asks for and this one cannot
// do is refused at load, by name. A Tokenizer is immutable; all its functions may be called from
// any number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "replayssm/status.h"

namespace replayssm {

class Tokenizer {
 public:
  static Result<Tokenizer> load(const std::string& path);

  /// `json`: the contents of a tokenizer.json; `name` is what messages call it.
  static Result<Tokenizer> parse(std::string_view json, std::string_view name = "tokenizer.json");

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Token ids of `text`, which must be valid UTF-8 (the status names the byte where it is not).
  /// `add_special_tokens` adds what the file's post_processor wants around a text (such as a
  /// begin-of-text token). `parse_special` = false treats special tokens written in the text as
  /// ordinary text, for text that must not be able to forge them.
  Result<std::vector<std::int32_t>> encode(std::string_view text, bool add_special_tokens = false,
                                           bool parse_special = true) const;

  /// The text of `ids`, bytes that are not UTF-8 replaced by U+FFFD. `skip_special` leaves out
  /// special tokens.
  Result<std::string> decode(std::span<const std::int32_t> ids, bool skip_special = false) const;

  /// The bytes a token stands for, not necessarily whole characters; an added token's text. An id
  /// out of range or without a token is an error. Valid as long as the tokenizer.
  Result<std::string_view> token_bytes(std::int32_t id) const;

  /// The token that stands for exactly `text`: an added token, else one of the model's.
  std::optional<std::int32_t> token_id(std::string_view text) const;

  /// An added token flagged special; false for ids out of range.
  bool is_special(std::int32_t id) const;

  /// One past the highest id. Ids in between may be without a token.
  std::int32_t vocab_size() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm
