// Regex: a compiled pre-tokenizer pattern. Patterns are written for Oniguruma (which Hugging Face
// tokenizers use) and run by PCRE2; constructs that mean something else there are refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "replayssm/status.h"

namespace replayssm {

class Regex {
 public:
  /// Working memory of one matcher, reused from call to call.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(Scratch&&) noexcept;
    Scratch& operator=(Scratch&&) noexcept;

   private:
    friend class Regex;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  struct Match {
    bool found = false;
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  static Result<Regex> compile(std::string_view pattern);

  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

  /// The leftmost match at or after `offset`. `text` must be valid UTF-8 and `offset` a character
  /// boundary.
  Result<Match> find(std::string_view text, std::size_t offset, Scratch& scratch) const;

 private:
  struct Impl;
  explicit Regex(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm
