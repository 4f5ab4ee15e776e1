// Reads a Hugging Face tokenizer.json into the parts of a Tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "replayssm/status.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pretokenizer.h"
#include "text/vocab.h"

namespace simdjson {
struct padded_string;
}

namespace replayssm {

struct TokenizerParts {
  std::string name;  // for messages
  Vocab vocab;
  Bpe bpe;
  AddedTokens added;
  PreTokenizer pre_tokenizer;
  bool nfc = false;
  std::vector<std::int32_t> prefix;  // what add_special_tokens puts around a text
  std::vector<std::int32_t> suffix;
};

Result<TokenizerParts> parse_tokenizer_json(const simdjson::padded_string& json,
                                            std::string_view name);

}  // namespace replayssm
