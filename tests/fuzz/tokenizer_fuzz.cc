// First byte even: the rest is a tokenizer.json, which is refused or else encodes some text.
// First byte odd: the rest is text for a fixed tokenizer; it must come back as it was, whole and
// token by token.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "engine/tiny_tokenizer.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"

namespace {

using replayssm::Tokenizer;

void check(bool condition) {
  if (!condition) std::abort();
}

void fuzz_json(std::string_view json) {
  const auto tokenizer = Tokenizer::parse(json);
  if (!tokenizer.ok()) {
    check(!tokenizer.status().message().empty());
    check(tokenizer.status().message().find('\n') == std::string::npos);
    return;
  }
  for (const std::string_view text :
       {"", "Hello, world! 12345", "  a\n\n\tb <s></s> e\xCC\x81 \xE6\xBC\xA2\xF0\x9F\x98\x80"}) {
    const auto ids = tokenizer->encode(text, true);
    if (!ids.ok()) continue;
    for (const std::int32_t id : *ids) check(id >= 0 && id < tokenizer->vocab_size());
    check(tokenizer->decode(*ids).ok());
  }
}

void fuzz_text(std::string_view text) {
  static const auto tokenizer = Tokenizer::parse(replayssm::test::tiny_tokenizer().json());
  for (const bool parse_special : {true, false}) {
    const auto ids = tokenizer->encode(text, false, parse_special);
    if (!ids.ok()) {
      check(ids.status().message().find("not valid UTF-8") != std::string::npos);
      return;
    }
    check(*tokenizer->decode(*ids) == text);
    replayssm::StreamDecoder decoder(*tokenizer);
    std::string streamed;
    for (const std::int32_t id : *ids) streamed += *decoder.push(id);
    check(streamed + decoder.finish() == text);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 2 == 0) {
    fuzz_json(rest);
  } else {
    fuzz_text(rest);
  }
  return 0;
}
