#include "text/tokenizer.h"

#include <simdjson.h>

#include <limits>
#include <mutex>
#include <utility>

#include "text/normalizer.h"
#include "text/tokenizer_json.h"
#include "text/utf8.h"

namespace replayssm {
namespace {

/// Working memory that a longer text took is not kept.
constexpr std::size_t kMaxKeptText = 1 << 20;

/// Working memory of one call of encode.
struct EncodeScratch {
  PreTokenizer::Scratch pre_tokenizer;
  Bpe::Scratch bpe;
  std::vector<AddedTokens::Segment> raw;
  std::vector<AddedTokens::Segment> normalized;
  std::string nfc;
};

/// Keeps as many EncodeScratch as there were calls at the same time.
class ScratchPool {
 public:
  std::unique_ptr<EncodeScratch> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        auto scratch = std::move(free_.back());
        free_.pop_back();
        return scratch;
      }
    }
    return std::make_unique<EncodeScratch>();
  }

  void give_back(std::unique_ptr<EncodeScratch> scratch) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(scratch));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<EncodeScratch>> free_;
};

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(TokenizerParts p) : parts(std::move(p)) {}

  Status encode(std::string_view text, bool parse_special, EncodeScratch& scratch,
                std::vector<std::int32_t>* ids) const;
  Status encode_normalized(std::string_view text, EncodeScratch& scratch,
                           std::vector<std::int32_t>* ids) const;

  TokenizerParts parts;
  mutable ScratchPool pool;
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::load(const std::string& path) {
  simdjson::padded_string json;
  if (const auto error = simdjson::padded_string::load(path).get(json)) {
    return not_found(path, ": cannot be read: ", simdjson::error_message(error));
  }
  RSSM_ASSIGN_OR_RETURN(TokenizerParts parts, parse_tokenizer_json(json, path));
  return Tokenizer(std::make_unique<Impl>(std::move(parts)));
}

Result<Tokenizer> Tokenizer::parse(std::string_view json, std::string_view name) {
  const simdjson::padded_string padded(json);
  RSSM_ASSIGN_OR_RETURN(TokenizerParts parts, parse_tokenizer_json(padded, name));
  return Tokenizer(std::make_unique<Impl>(std::move(parts)));
}

Result<std::vector<std::int32_t>> Tokenizer::encode(std::string_view text, bool add_special_tokens,
                                                    bool parse_special) const {
  if (text.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()) / 4) {
    return invalid_argument("text of ", text.size(), " bytes is too long to tokenize at once");
  }
  if (const std::size_t at = find_invalid_utf8(text); at != std::string_view::npos) {
    return invalid_argument("text is not valid UTF-8 at byte ", at, " of ", text.size());
  }
  const TokenizerParts& parts = impl_->parts;
  std::vector<std::int32_t> ids;
  ids.reserve(text.size() / 3 + parts.prefix.size() + parts.suffix.size() + 1);
  if (add_special_tokens) ids = parts.prefix;
  auto scratch = impl_->pool.take();
  const Status status = impl_->encode(text, parse_special, *scratch, &ids);
  if (text.size() <= kMaxKeptText) impl_->pool.give_back(std::move(scratch));
  RSSM_RETURN_IF_ERROR(status);
  if (add_special_tokens) ids.insert(ids.end(), parts.suffix.begin(), parts.suffix.end());
  return ids;
}

Status Tokenizer::Impl::encode(std::string_view text, bool parse_special, EncodeScratch& scratch,
                               std::vector<std::int32_t>* ids) const {
  using Stage = AddedTokens::Stage;
  scratch.raw.clear();
  parts.added.split(text, Stage::kRawText, parse_special, &scratch.raw);
  for (const AddedTokens::Segment& raw : scratch.raw) {
    if (raw.id >= 0) {
      ids->push_back(raw.id);
      continue;
    }
    std::string_view normalized = raw.text;
    if (parts.nfc) {
      RSSM_ASSIGN_OR_RETURN(normalized, to_nfc(raw.text, &scratch.nfc));
    }
    scratch.normalized.clear();
    parts.added.split(normalized, Stage::kNormalizedText, parse_special, &scratch.normalized);
    for (const AddedTokens::Segment& segment : scratch.normalized) {
      if (segment.id >= 0) {
        ids->push_back(segment.id);
      } else {
        RSSM_RETURN_IF_ERROR(encode_normalized(segment.text, scratch, ids));
      }
    }
  }
  return Status();
}

Status Tokenizer::Impl::encode_normalized(std::string_view text, EncodeScratch& scratch,
                                          std::vector<std::int32_t>* ids) const {
  RSSM_RETURN_IF_ERROR(parts.pre_tokenizer.split(text, scratch.pre_tokenizer));
  for (const std::string_view piece : scratch.pre_tokenizer.pieces) {
    const int missing = parts.bpe.encode(piece, parts.vocab, scratch.bpe, ids);
    if (missing >= 0) {
      return invalid_argument(parts.name, " has no token for byte ", missing, " of ",
                              in_quotes(piece));
    }
  }
  return Status();
}

Result<std::string> Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const std::int32_t id : ids) {
    RSSM_ASSIGN_OR_RETURN(const std::string_view token, token_bytes(id));
    if (skip_special && is_special(id)) continue;
    bytes += token;
  }
  if (find_invalid_utf8(bytes) == std::string_view::npos) return bytes;
  std::string text;
  if (append_utf8_lossy(bytes, &text) < bytes.size()) text += kReplacementCharacter;
  return text;
}

Result<std::string_view> Tokenizer::token_bytes(std::int32_t id) const {
  const Vocab& vocab = impl_->parts.vocab;
  if (id < 0 || id >= vocab.size()) {
    return invalid_argument("token id ", id, " is not in [0, ", vocab.size(), ")");
  }
  const auto bytes = vocab.bytes(id);
  if (!bytes) return invalid_argument("token id ", id, " of ", vocab.size(), " has no token");
  return *bytes;
}

std::optional<std::int32_t> Tokenizer::token_id(std::string_view text) const {
  if (const AddedToken* token = impl_->parts.added.find(text)) return token->id;
  const std::int32_t id = impl_->parts.vocab.find(text);
  if (id < 0) return std::nullopt;
  return id;
}

bool Tokenizer::is_special(std::int32_t id) const {
  const AddedToken* token = impl_->parts.added.find(id);
  return token != nullptr && token->special;
}

std::int32_t Tokenizer::vocab_size() const { return impl_->parts.vocab.size(); }

}  // namespace replayssm
