#include "text/tokenizer_json.h"

#include <simdjson.h>

#include <array>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

#include "text/byte_level.h"
#include "text/normalizer.h"
#include "text/utf8.h"

namespace replayssm {
namespace {

namespace dom = simdjson::dom;

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr int kMaxNesting = 16;  // of Sequence within Sequence

/// A merge on its way from the file to the model. Batches of them hide the latency of memory, which
/// is what loading a vocabulary takes otherwise.
struct Merge {
  std::int32_t rank = 0;
  std::string_view left;  // as written
  std::string_view right;
  std::string bytes;                      // of both
  std::array<std::string_view, 3> parts;  // of bytes: left, right, both
  std::array<std::uint32_t, 3> hashes{};
  std::array<std::int32_t, 3> ids{};
};
constexpr std::size_t kMergeBatch = 32;

/// One section of the file after the other; `name` prefixes every message.
class Loader {
 public:
  explicit Loader(std::string_view name) { parts_.name = name; }

  Result<TokenizerParts> load(const simdjson::padded_string& json);

 private:
  template <typename... Args>
  Status corrupt(const Args&... args) const {
    return data_loss(parts_.name, ": ", args...);
  }
  template <typename... Args>
  Status refuse(const Args&... args) const {
    return unsupported(parts_.name, ": ", args...);
  }
  Status prefixed(const Status& status) const {
    return Status(status.code(), parts_.name + ": " + status.message());
  }

  // Members of an object. Absent and null are the same: nothing, or the default.
  static std::optional<dom::element> member(const dom::object& object, std::string_view key);
  Result<bool> flag(const dom::object& object, std::string_view key, bool absent) const;
  Result<std::string_view> text(const dom::object& object, std::string_view key,
                                std::string_view where) const;
  Result<std::int32_t> token_id(dom::element value, std::string_view where) const;
  Result<dom::object> section(dom::element value, std::string_view where) const;
  Result<dom::array> list(const dom::object& object, std::string_view key,
                          std::string_view where) const;

  Status read_added_tokens(const dom::object& root);
  Result<AddedToken> read_added_token(const dom::element& value) const;
  Status read_model(const dom::object& root);
  Status check_model_options(const dom::object& model) const;
  Status read_vocab(const dom::object& model);
  Status read_merges(const dom::object& model);
  Status read_merge(const dom::element& value, std::int32_t rank, Merge* merge) const;
  Status add_merges(std::span<Merge> batch);
  Status no_such_part(std::int32_t rank, std::string_view part) const;
  Status read_normalizer(dom::element value, int depth);
  Status read_pre_tokenizer(dom::element value, int depth);
  Status read_split(const dom::object& object);
  Status read_digits(const dom::object& object);
  Status read_byte_level(const dom::object& object);
  Status read_decoder(const dom::object& root) const;
  Status read_post_processor(dom::element value, int depth);
  Status read_template(const dom::object& object);
  Status define_added_tokens();
  Status define_added_token(AddedToken token);

  TokenizerParts parts_;
  std::vector<AddedToken> added_;  // in the order of the file
  std::unordered_map<std::string_view, std::int32_t> added_ids_;
  bool byte_level_ = false;  // the pre-tokenizer got to its ByteLevel step
};

std::optional<dom::element> Loader::member(const dom::object& object, std::string_view key) {
  dom::element value;
  if (object[key].get(value) != simdjson::SUCCESS || value.is_null()) return std::nullopt;
  return value;
}

Result<bool> Loader::flag(const dom::object& object, std::string_view key, bool absent) const {
  const auto value = member(object, key);
  if (!value) return absent;
  bool result = false;
  if (value->get(result) != simdjson::SUCCESS) return corrupt("'", key, "' is not true or false");
  return result;
}

Result<std::string_view> Loader::text(const dom::object& object, std::string_view key,
                                      std::string_view where) const {
  const auto value = member(object, key);
  std::string_view result;
  if (!value || value->get(result) != simdjson::SUCCESS) {
    return corrupt(where, " has no string '", key, "'");
  }
  return result;
}

Result<std::int32_t> Loader::token_id(dom::element value, std::string_view where) const {
  std::int64_t id = -1;
  if (value.get(id) != simdjson::SUCCESS || id < 0 || id >= Vocab::kMaxTokens) {
    return corrupt(where, " has an id that is not an integer in [0, ", Vocab::kMaxTokens, ")");
  }
  return static_cast<std::int32_t>(id);
}

Result<dom::object> Loader::section(dom::element value, std::string_view where) const {
  dom::object object;
  if (value.get(object) != simdjson::SUCCESS) return corrupt(where, " is not an object");
  return object;
}

Result<dom::array> Loader::list(const dom::object& object, std::string_view key,
                                std::string_view where) const {
  const auto value = member(object, key);
  dom::array array;
  if (!value || value->get(array) != simdjson::SUCCESS) {
    return corrupt(where, " has no array '", key, "'");
  }
  return array;
}

Result<TokenizerParts> Loader::load(const simdjson::padded_string& json) {
  dom::parser parser;
  dom::element document;
  if (const auto error = parser.parse(json).get(document); error != simdjson::SUCCESS) {
    return corrupt("not valid JSON (", json.size(), " bytes): ", simdjson::error_message(error));
  }
  // "truncation" and "padding" are left alone: they belong to batches of training text.
  RSSM_ASSIGN_OR_RETURN(const dom::object root, section(document, "the document"));
  RSSM_RETURN_IF_ERROR(read_added_tokens(root));
  RSSM_RETURN_IF_ERROR(read_model(root));
  if (const auto value = member(root, "normalizer")) {
    RSSM_RETURN_IF_ERROR(read_normalizer(*value, 0));
  }
  if (const auto value = member(root, "pre_tokenizer")) {
    RSSM_RETURN_IF_ERROR(read_pre_tokenizer(*value, 0));
  }
  if (!byte_level_) return refuse("a pre_tokenizer without ByteLevel is not supported");
  RSSM_RETURN_IF_ERROR(read_decoder(root));
  RSSM_RETURN_IF_ERROR(define_added_tokens());
  if (const auto value = member(root, "post_processor")) {
    RSSM_RETURN_IF_ERROR(read_post_processor(*value, 0));
  }
  return std::move(parts_);
}

Status Loader::read_added_tokens(const dom::object& root) {
  if (!member(root, "added_tokens")) return Status();
  RSSM_ASSIGN_OR_RETURN(const dom::array values, list(root, "added_tokens", "the document"));
  std::unordered_map<std::int32_t, std::size_t> by_id;
  for (const dom::element value : values) {
    RSSM_ASSIGN_OR_RETURN(AddedToken token, read_added_token(value));
    if (const auto [it, fresh] = by_id.emplace(token.id, added_.size()); !fresh) {
      return corrupt("added tokens ", in_quotes(added_[it->second].content), " and ",
                     in_quotes(token.content), " both have id ", token.id);
    }
    added_.push_back(std::move(token));
  }
  for (const AddedToken& token : added_) {  // added_ no longer moves
    if (const auto [it, fresh] = added_ids_.emplace(token.content, token.id); !fresh) {
      return corrupt("added token ", in_quotes(token.content), " has ids ", it->second, " and ",
                     token.id);
    }
  }
  return Status();
}

Result<AddedToken> Loader::read_added_token(const dom::element& value) const {
  RSSM_ASSIGN_OR_RETURN(const dom::object object, section(value, "an added token"));
  AddedToken token;
  RSSM_ASSIGN_OR_RETURN(token.content, text(object, "content", "an added token"));
  if (token.content.empty()) return corrupt("an added token has an empty content");
  const std::string where = "added token " + in_quotes(token.content);
  const auto id = member(object, "id");
  if (!id) return corrupt(where, " has no id");
  RSSM_ASSIGN_OR_RETURN(token.id, token_id(*id, where));
  RSSM_ASSIGN_OR_RETURN(token.special, flag(object, "special", false));
  RSSM_ASSIGN_OR_RETURN(token.lstrip, flag(object, "lstrip", false));
  RSSM_ASSIGN_OR_RETURN(token.rstrip, flag(object, "rstrip", false));
  RSSM_ASSIGN_OR_RETURN(token.single_word, flag(object, "single_word", false));
  RSSM_ASSIGN_OR_RETURN(token.normalized, flag(object, "normalized", !token.special));
  return token;
}

Status Loader::read_model(const dom::object& root) {
  const auto value = member(root, "model");
  if (!value) return corrupt("there is no 'model'");
  RSSM_ASSIGN_OR_RETURN(const dom::object model, section(*value, "model"));
  RSSM_RETURN_IF_ERROR(check_model_options(model));
  RSSM_RETURN_IF_ERROR(read_vocab(model));
  parts_.bpe.set_alphabet(parts_.vocab);
  RSSM_RETURN_IF_ERROR(read_merges(model));
  RSSM_ASSIGN_OR_RETURN(const bool ignore_merges, flag(model, "ignore_merges", false));
  parts_.bpe.set_ignore_merges(ignore_merges);
  return Status();
}

Status Loader::check_model_options(const dom::object& model) const {
  // Old files have no type; the vocabulary and the merges tell.
  if (member(model, "type")) {
    RSSM_ASSIGN_OR_RETURN(const std::string_view type, text(model, "type", "model"));
    if (type != "BPE") return refuse("model type ", in_quotes(type), " is not supported");
  }
  RSSM_ASSIGN_OR_RETURN(const bool byte_fallback, flag(model, "byte_fallback", false));
  if (byte_fallback) return refuse("model 'byte_fallback' is not supported");
  if (const auto dropout = member(model, "dropout")) {
    double rate = 0;
    if (dropout->get(rate) != simdjson::SUCCESS || rate != 0) {
      return refuse("model 'dropout' is not supported");
    }
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!member(model, key)) continue;
    RSSM_ASSIGN_OR_RETURN(const std::string_view affix, text(model, key, "model"));
    if (!affix.empty()) return refuse("model '", key, "' ", in_quotes(affix), " is not supported");
  }
  return Status();
}

Status Loader::read_vocab(const dom::object& model) {
  const auto value = member(model, "vocab");
  if (!value) return corrupt("model has no 'vocab'");
  RSSM_ASSIGN_OR_RETURN(const dom::object vocab, section(*value, "model 'vocab'"));
  parts_.vocab.reserve(vocab.size() + added_.size(), 8 * vocab.size());
  std::string bytes;
  for (const auto& [token, id_value] : vocab) {
    std::int64_t id = -1;
    if (id_value.get(id) != simdjson::SUCCESS || id < 0 || id >= Vocab::kMaxTokens) {
      return corrupt("token ", in_quotes(token), " has an id that is not an integer in [0, ",
                     Vocab::kMaxTokens, ")");
    }
    const std::int32_t id32 = static_cast<std::int32_t>(id);
    bytes.clear();
    const bool byte_level = append_byte_level(token, &bytes);
    if (!byte_level) {
      // Only as text that is found before BPE; anything else would never be produced.
      const auto added = added_ids_.find(token);
      if (added == added_ids_.end()) {
        return corrupt("token ", in_quotes(token), " (id ", id,
                       ") is not written in the byte-level alphabet");
      }
      if (added->second != id32) {
        return corrupt("added token ", in_quotes(token), " has id ", added->second,
                       " but the vocab says ", id);
      }
      bytes = token;
    }
    if (!parts_.vocab.define(id32, bytes)) {
      return corrupt("id ", id, " of token ", in_quotes(token), " is already that of ",
                     in_quotes(*parts_.vocab.bytes(id32)));
    }
    if (byte_level && !parts_.vocab.index(id32)) {
      return corrupt("token ", in_quotes(token), " occurs twice in the vocab");
    }
  }
  return Status();
}

Status Loader::read_merges(const dom::object& model) {
  RSSM_ASSIGN_OR_RETURN(const dom::array merges, list(model, "merges", "model"));
  parts_.bpe.reserve_merges(merges.size());
  std::int32_t rank = 0;
  std::vector<Merge> batch(kMergeBatch);
  std::size_t count = 0;
  for (const dom::element value : merges) {
    RSSM_RETURN_IF_ERROR(read_merge(value, rank++, &batch[count]));
    if (++count == batch.size()) {
      RSSM_RETURN_IF_ERROR(add_merges(batch));
      count = 0;
    }
  }
  return add_merges(std::span(batch).first(count));
}

Status Loader::read_merge(const dom::element& value, std::int32_t rank, Merge* merge) const {
  std::string_view both;
  dom::array pair;
  if (value.get(both) == simdjson::SUCCESS) {
    const std::size_t space = both.find(' ');
    if (space == std::string_view::npos || both.find(' ', space + 1) != std::string_view::npos) {
      return corrupt("merge ", rank, " ", in_quotes(both), " is not two tokens");
    }
    merge->left = both.substr(0, space);
    merge->right = both.substr(space + 1);
  } else if (value.get(pair) != simdjson::SUCCESS || pair.size() != 2 ||
             pair.at(0).get(merge->left) != simdjson::SUCCESS ||
             pair.at(1).get(merge->right) != simdjson::SUCCESS) {
    return corrupt("merge ", rank, " is neither a string nor two strings");
  }
  merge->rank = rank;
  merge->bytes.clear();
  if (!append_byte_level(merge->left, &merge->bytes)) return no_such_part(rank, merge->left);
  const std::size_t split = merge->bytes.size();
  if (!append_byte_level(merge->right, &merge->bytes)) return no_such_part(rank, merge->right);
  const std::string_view bytes = merge->bytes;
  merge->parts = {bytes.substr(0, split), bytes.substr(split), bytes};
  for (std::size_t i = 0; i < merge->parts.size(); ++i) {
    merge->hashes[i] = Vocab::hash_of(merge->parts[i]);
    parts_.vocab.prefetch(merge->hashes[i]);
  }
  return Status();
}

Status Loader::add_merges(std::span<Merge> batch) {
  for (Merge& merge : batch) {
    for (std::size_t i = 0; i < merge.parts.size(); ++i) {
      merge.ids[i] = parts_.vocab.find(merge.parts[i], merge.hashes[i]);
    }
    if (merge.ids[0] < 0) return no_such_part(merge.rank, merge.left);
    if (merge.ids[1] < 0) return no_such_part(merge.rank, merge.right);
    if (merge.ids[2] < 0) {
      return corrupt("merge ", merge.rank, " makes ",
                     in_quotes(std::string(merge.left) + std::string(merge.right)),
                     ", which is not in the vocab");
    }
    parts_.bpe.prefetch_merge(merge.ids[0], merge.ids[1]);
  }
  for (const Merge& merge : batch) {
    parts_.bpe.add_merge(merge.ids[0], merge.ids[1], merge.rank, merge.ids[2]);
  }
  return Status();
}

Status Loader::no_such_part(std::int32_t rank, std::string_view part) const {
  return corrupt("merge ", rank, " names ", in_quotes(part), ", which is not in the vocab");
}

Status Loader::read_normalizer(dom::element value, int depth) {
  RSSM_ASSIGN_OR_RETURN(const dom::object object, section(value, "normalizer"));
  RSSM_ASSIGN_OR_RETURN(const std::string_view type, text(object, "type", "normalizer"));
  if (type == "NFC") {
    parts_.nfc = true;
    return Status();
  }
  if (type != "Sequence" || depth >= kMaxNesting) {
    return refuse("normalizer type ", in_quotes(type), " is not supported");
  }
  RSSM_ASSIGN_OR_RETURN(const dom::array steps, list(object, "normalizers", "normalizer Sequence"));
  for (const dom::element step : steps) RSSM_RETURN_IF_ERROR(read_normalizer(step, depth + 1));
  return Status();
}

Status Loader::read_pre_tokenizer(dom::element value, int depth) {
  RSSM_ASSIGN_OR_RETURN(const dom::object object, section(value, "pre_tokenizer"));
  RSSM_ASSIGN_OR_RETURN(const std::string_view type, text(object, "type", "pre_tokenizer"));
  if (type == "Sequence" && depth < kMaxNesting) {
    RSSM_ASSIGN_OR_RETURN(const dom::array steps,
                          list(object, "pretokenizers", "pre_tokenizer Sequence"));
    for (const dom::element step : steps) {
      RSSM_RETURN_IF_ERROR(read_pre_tokenizer(step, depth + 1));
    }
    return Status();
  }
  if (byte_level_)
    return refuse("pre_tokenizer ", in_quotes(type), " behind ByteLevel is not supported");
  if (type == "Split") return read_split(object);
  if (type == "Digits") return read_digits(object);
  if (type == "ByteLevel") return read_byte_level(object);
  return refuse("pre_tokenizer type ", in_quotes(type), " is not supported");
}

Status Loader::read_split(const dom::object& object) {
  constexpr std::pair<std::string_view, SplitBehavior> kBehaviors[] = {
      {"Removed", SplitBehavior::kRemoved},
      {"Isolated", SplitBehavior::kIsolated},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous},
  };
  RSSM_ASSIGN_OR_RETURN(const std::string_view name,
                        text(object, "behavior", "pre_tokenizer Split"));
  std::optional<SplitBehavior> behavior;
  for (const auto& [known, value] : kBehaviors) {
    if (name == known) behavior = value;
  }
  if (!behavior) return refuse("Split behavior ", in_quotes(name), " is not supported");
  RSSM_ASSIGN_OR_RETURN(const bool invert, flag(object, "invert", false));
  const auto pattern = member(object, "pattern");
  if (!pattern) return corrupt("pre_tokenizer Split has no 'pattern'");
  RSSM_ASSIGN_OR_RETURN(const dom::object kinds, section(*pattern, "Split 'pattern'"));
  if (member(kinds, "String")) {
    RSSM_ASSIGN_OR_RETURN(const std::string_view literal, text(kinds, "String", "Split 'pattern'"));
    if (literal.empty()) return refuse("an empty Split pattern is not supported");
    parts_.pre_tokenizer.add_split(std::string(literal), *behavior, invert);
    return Status();
  }
  RSSM_ASSIGN_OR_RETURN(const std::string_view source, text(kinds, "Regex", "Split 'pattern'"));
  Result<Regex> regex = Regex::compile(source);
  if (!regex.ok()) return prefixed(regex.status());
  parts_.pre_tokenizer.add_split(std::move(regex).value(), *behavior, invert);
  return Status();
}

Status Loader::read_digits(const dom::object& object) {
  RSSM_ASSIGN_OR_RETURN(const bool individual, flag(object, "individual_digits", false));
  Result<Regex> regex = Regex::compile("\\p{N}");
  if (!regex.ok()) return prefixed(regex.status());
  parts_.pre_tokenizer.add_split(std::move(regex).value(),
                                 individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous,
                                 false);
  return Status();
}

Status Loader::read_byte_level(const dom::object& object) {
  byte_level_ = true;
  RSSM_ASSIGN_OR_RETURN(const bool prefix_space, flag(object, "add_prefix_space", true));
  RSSM_ASSIGN_OR_RETURN(const bool use_regex, flag(object, "use_regex", true));
  if (prefix_space) parts_.pre_tokenizer.add_prefix_space();
  if (!use_regex) return Status();
  Result<Regex> regex = Regex::compile(kGpt2Pattern);
  if (!regex.ok()) return prefixed(regex.status());
  parts_.pre_tokenizer.add_split(std::move(regex).value(), SplitBehavior::kIsolated, false);
  return Status();
}

Status Loader::read_decoder(const dom::object& root) const {
  const auto value = member(root, "decoder");
  if (!value) return refuse("a file without a ByteLevel decoder is not supported");
  RSSM_ASSIGN_OR_RETURN(const dom::object object, section(*value, "decoder"));
  RSSM_ASSIGN_OR_RETURN(const std::string_view type, text(object, "type", "decoder"));
  if (type != "ByteLevel") return refuse("decoder type ", in_quotes(type), " is not supported");
  return Status();
}

Status Loader::read_post_processor(dom::element value, int depth) {
  RSSM_ASSIGN_OR_RETURN(const dom::object object, section(value, "post_processor"));
  RSSM_ASSIGN_OR_RETURN(const std::string_view type, text(object, "type", "post_processor"));
  if (type == "ByteLevel") return Status();  // concerns offsets only
  if (type == "TemplateProcessing") return read_template(object);
  if (type != "Sequence" || depth >= kMaxNesting) {
    return refuse("post_processor type ", in_quotes(type), " is not supported");
  }
  RSSM_ASSIGN_OR_RETURN(const dom::array steps,
                        list(object, "processors", "post_processor Sequence"));
  for (const dom::element step : steps) {
    RSSM_RETURN_IF_ERROR(read_post_processor(step, depth + 1));
  }
  return Status();
}

/// {"single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
///  "special_tokens": {"<s>": {"ids": [1]}}}
Status Loader::read_template(const dom::object& object) {
  RSSM_ASSIGN_OR_RETURN(const dom::array pieces, list(object, "single", "TemplateProcessing"));
  std::vector<std::int32_t> before;
  std::vector<std::int32_t> after;
  int sequences = 0;
  for (const dom::element value : pieces) {
    RSSM_ASSIGN_OR_RETURN(const dom::object piece, section(value, "a template piece"));
    if (member(piece, "Sequence")) {
      ++sequences;
      continue;
    }
    const auto special = member(piece, "SpecialToken");
    if (!special) return corrupt("a template piece is neither Sequence nor SpecialToken");
    RSSM_ASSIGN_OR_RETURN(const dom::object reference, section(*special, "SpecialToken"));
    RSSM_ASSIGN_OR_RETURN(const std::string_view key, text(reference, "id", "SpecialToken"));
    const auto table = member(object, "special_tokens");
    if (!table) return corrupt("TemplateProcessing has no 'special_tokens'");
    RSSM_ASSIGN_OR_RETURN(const dom::object tokens, section(*table, "'special_tokens'"));
    const auto entry = member(tokens, key);
    if (!entry) return corrupt("the template names ", in_quotes(key), ", not in 'special_tokens'");
    RSSM_ASSIGN_OR_RETURN(const dom::object token, section(*entry, "a template token"));
    RSSM_ASSIGN_OR_RETURN(const dom::array ids, list(token, "ids", "a template token"));
    for (const dom::element id_value : ids) {
      RSSM_ASSIGN_OR_RETURN(const std::int32_t id,
                            token_id(id_value, "template token " + in_quotes(key)));
      if (!parts_.vocab.bytes(id)) {
        return corrupt("template token ", in_quotes(key), " has id ", id, ", which has no token");
      }
      (sequences == 0 ? before : after).push_back(id);
    }
  }
  if (sequences != 1) return refuse("a template with ", sequences, " texts is not supported");
  parts_.prefix.insert(parts_.prefix.begin(), before.begin(), before.end());
  parts_.suffix.insert(parts_.suffix.end(), after.begin(), after.end());
  return Status();
}

/// Needs the vocab and the normalizer.
Status Loader::define_added_tokens() {
  added_ids_.clear();  // its keys are views of what moves now
  // Of tokens with the same normalized form the first is found, a special one if there is one.
  for (const bool special : {true, false}) {
    for (AddedToken& token : added_) {
      if (token.special == special) RSSM_RETURN_IF_ERROR(define_added_token(std::move(token)));
    }
  }
  return Status();
}

Status Loader::define_added_token(AddedToken token) {
  std::string bytes;
  const std::int32_t model_id =
      append_byte_level(token.content, &bytes) ? parts_.vocab.find(bytes) : -1;
  if (model_id >= 0 && model_id != token.id) {
    return corrupt("added token ", in_quotes(token.content), " has id ", token.id,
                   " but the vocab says ", model_id);
  }
  if (model_id < 0 && !parts_.vocab.define(token.id, token.content) &&
      *parts_.vocab.bytes(token.id) != token.content) {
    return corrupt("id ", token.id, " of added token ", in_quotes(token.content),
                   " is already that of ", in_quotes(*parts_.vocab.bytes(token.id)));
  }
  std::string pattern = token.content;
  if (token.normalized && parts_.nfc) {
    std::string buffer;
    RSSM_ASSIGN_OR_RETURN(pattern, to_nfc(token.content, &buffer));
  }
  parts_.added.add(std::move(token), pattern);
  return Status();
}

}  // namespace

Result<TokenizerParts> parse_tokenizer_json(const simdjson::padded_string& json,
                                            std::string_view name) {
  return Loader(name).load(json);
}

}  // namespace replayssm
