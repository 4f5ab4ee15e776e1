#include "text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <limits>

#include "text/utf8.h"

namespace replayssm {
namespace {

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* pointer) const {
    Free(pointer);
  }
};

using Code = std::unique_ptr<pcre2_code, Deleter<pcre2_code_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Deleter<pcre2_compile_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>>;
using JitStack = std::unique_ptr<pcre2_jit_stack, Deleter<pcre2_jit_stack_free>>;

constexpr std::size_t kMaxPattern = 64 * 1024;
// Backtracking is bounded: a hostile pattern gets an error. Real ones may step back over a whole
// run of white space or letters, so the bound grows with the text.
constexpr std::uint32_t kMatchLimit = 1'000'000;
constexpr std::uint32_t kMatchLimitPerByte = 4;
constexpr std::uint32_t kHeapLimitKib = 64 * 1024;
constexpr std::size_t kJitStackStart = 32 * 1024;
constexpr std::size_t kJitStackMax = 1024 * 1024;

std::string error_text(int code) {
  std::array<PCRE2_UCHAR, 160> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

// What \s and \w are to Oniguruma, as class bodies. (PCRE2's \s has U+180E too, and its \w lacks
// marks and most connectors.)
constexpr std::string_view kSpaceBody = "\\t-\\r\\x{85}\\p{Z}";
constexpr std::string_view kWordBody = "\\p{L}\\p{M}\\p{N}\\p{Pc}";

/// Rewrites a pattern for PCRE2 where the dialects differ; refuses what cannot be rewritten.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  Result<std::string> run() {
    for (; pos_ < pattern_.size(); ++pos_) {
      if (pattern_[pos_] == '\\') {
        RSSM_RETURN_IF_ERROR(escape());
      } else if (in_class_) {
        RSSM_RETURN_IF_ERROR(class_member());
      } else {
        RSSM_RETURN_IF_ERROR(plain());
      }
    }
    return std::move(out_);
  }

 private:
  char next() const { return pos_ + 1 < pattern_.size() ? pattern_[pos_ + 1] : '\0'; }

  Status refuse(std::string_view what) const {
    return unsupported("regex ", in_quotes(pattern_), " uses ", what, ", which is not supported");
  }

  Status escape() {
    const char c = next();
    switch (c) {
      case 's':
        return set(kSpaceBody, false);
      case 'w':
        return set(kWordBody, false);
      case 'S':
        // Within a class PCRE2's own will do: it lacks only U+180E.
        if (!in_class_) return set(kSpaceBody, true);
        break;
      case 'W':
        if (in_class_) return refuse("\\W within a class");
        return set(kWordBody, true);
      case 'b':
      case 'B':
        if (!in_class_) return refuse("a word boundary");
        break;
      case 'h':
      case 'H':
        return refuse("\\h (a hex digit to Oniguruma)");
      default:
        break;
    }
    out_ += '\\';
    if (++pos_ < pattern_.size()) out_ += c;
    return Status();
  }

  Status set(std::string_view body, bool negated) {
    if (!in_class_) out_ += negated ? "[^" : "[";
    out_ += body;
    if (!in_class_) out_ += ']';
    ++pos_;
    if (in_class_ && next() == '-') {  // literal: a set does not begin a range
      out_ += "\\-";
      ++pos_;
    }
    return Status();
  }

  Status class_member() {
    const char c = pattern_[pos_];
    if (c == '&' && next() == '&') return refuse("the class intersection '&&'");
    if (c == '[') return refuse(next() == ':' ? "a POSIX class" : "a class within a class");
    if (c == ']' && pos_ > class_start_) in_class_ = false;
    out_ += c;
    return Status();
  }

  Status plain() {
    const char c = pattern_[pos_];
    if (c == '(' && next() == '*') return refuse("'(*'");
    if (c == '[') {
      in_class_ = true;
      class_start_ = pos_ + (next() == '^' ? 2 : 1);  // a ']' there is literal
    }
    out_ += c;
    return Status();
  }

  std::string_view pattern_;
  std::string out_;
  std::size_t pos_ = 0;
  bool in_class_ = false;
  std::size_t class_start_ = 0;
};

}  // namespace

struct Regex::Impl {
  std::string pattern;
  Code code;
  bool jit = false;
};

struct Regex::Scratch::Impl {
  MatchData data{pcre2_match_data_create(1, nullptr)};
  MatchContext context{pcre2_match_context_create(nullptr)};
  JitStack stack{pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr)};

  Impl() {
    if (context == nullptr) return;
    pcre2_set_heap_limit(context.get(), kHeapLimitKib);
    if (stack != nullptr) pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }
};

Regex::Scratch::Scratch() : impl_(std::make_unique<Impl>()) {}
Regex::Scratch::~Scratch() = default;
Regex::Scratch::Scratch(Scratch&&) noexcept = default;
Regex::Scratch& Regex::Scratch::operator=(Scratch&&) noexcept = default;

Regex::Regex(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;
Regex::~Regex() = default;

Result<Regex> Regex::compile(std::string_view pattern) {
  if (pattern.size() > kMaxPattern) {
    return unsupported("regex of ", pattern.size(), " bytes is longer than ", kMaxPattern);
  }
  RSSM_ASSIGN_OR_RETURN(const std::string translated, Translator(pattern).run());
  const CompileContext context(pcre2_compile_context_create(nullptr));
  if (context == nullptr) return resource_exhausted("no memory to compile a regex");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  auto impl = std::make_unique<Impl>();
  impl->pattern = pattern;
  // Oniguruma's ^ and $ match at every line. \C would split characters.
  constexpr std::uint32_t kOptions =
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  int code = 0;
  PCRE2_SIZE offset = 0;
  impl->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                 kOptions, &code, &offset, context.get()));
  if (impl->code == nullptr) {
    return unsupported("regex ", in_quotes(pattern), " is not supported: ", error_text(code));
  }
  // Where executable memory is not to be had, the interpreter does.
  impl->jit = pcre2_jit_compile(impl->code.get(), PCRE2_JIT_COMPLETE) == 0;
  return Regex(std::move(impl));
}

Result<Regex::Match> Regex::find(std::string_view text, std::size_t offset,
                                 Scratch& scratch) const {
  Scratch::Impl& s = *scratch.impl_;
  if (s.data == nullptr || s.context == nullptr) {
    return resource_exhausted("no memory to run a regex");
  }
  const std::size_t steps = kMatchLimit + kMatchLimitPerByte * text.size();
  pcre2_set_match_limit(s.context.get(), static_cast<std::uint32_t>(std::min<std::size_t>(
                                             steps, std::numeric_limits<std::uint32_t>::max())));
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  int found = PCRE2_ERROR_JIT_STACKLIMIT;
  if (impl_->jit) {
    found = pcre2_jit_match(impl_->code.get(), subject, text.size(), offset, 0, s.data.get(),
                            s.context.get());
  }
  if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
    found = pcre2_match(impl_->code.get(), subject, text.size(), offset,
                        PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s.data.get(), s.context.get());
  }
  if (found == PCRE2_ERROR_NOMATCH) return Match{};
  if (found < 0) {
    return resource_exhausted("regex ", in_quotes(impl_->pattern), " failed at byte ", offset,
                              " of a piece of ", text.size(), ": ", error_text(found));
  }
  const PCRE2_SIZE* span = pcre2_get_ovector_pointer(s.data.get());
  if (span[0] < offset || span[1] < span[0]) {
    return unsupported("regex ", in_quotes(impl_->pattern), " moved a match's start backwards");
  }
  return Match{true, span[0], span[1]};
}

}  // namespace replayssm
