#include "draft.h"

#include <algorithm>
#include <charconv>

#include "io/quote.h"
#include "runtime/draft/model_draft.h"
#include "runtime/draft/mtp_draft.h"

namespace replayssm::app {
namespace {

/// "ngram" or "ngram:MIN-MAX"; nothing for other sources.
Result<std::optional<NgramOptions>> parse_ngram(const std::string& source) {
  const std::string prefix = "ngram:";
  NgramOptions options;
  if (source == "ngram") return std::optional(options);
  if (!source.starts_with(prefix)) return std::optional<NgramOptions>();
  const char* const end = source.data() + source.size();
  const auto first = std::from_chars(source.data() + prefix.size(), end, options.shortest);
  if (first.ec == std::errc() && first.ptr != end && *first.ptr == '-') {
    const auto second = std::from_chars(first.ptr + 1, end, options.longest);
    if (second.ec == std::errc() && second.ptr == end) {
      RSSM_RETURN_IF_ERROR(NgramDraft::create(options).status());
      return std::optional(options);
    }
  }
  return invalid_argument("--draft is ", quote(source),
                          ", expected ngram:MIN-MAX such as ngram:2-5");
}

/// A token's bytes, or what stands for their absence.
std::string token_text(const Tokenizer& tokenizer, std::int32_t id) {
  const Result<std::string_view> bytes = tokenizer.token_bytes(id);
  if (!bytes.ok()) return "no token";
  std::string text = quote(*bytes);
  if (tokenizer.is_special(id)) text += " (special)";
  return text;
}

Status check_same_vocabulary(const Tokenizer& target, const std::string& target_folder,
                             const Tokenizer& draft, const std::string& draft_folder) {
  const std::int32_t size = std::max(target.vocab_size(), draft.vocab_size());
  for (std::int32_t id = 0; id < size; ++id) {
    const std::string expected = token_text(target, id);
    const std::string found = token_text(draft, id);
    if (found != expected) {
      return invalid_argument("--draft: ", draft_folder, " has another vocabulary than ",
                              target_folder, ": token id ", id, " is ", found, ", expected ",
                              expected);
    }
  }
  return {};
}

}  // namespace

Status check_draft(const std::string& source, int tokens, DecodeMode decode, int window) {
  if (source == "none") {
    if (decode == DecodeMode::kSnapshot) {
      return invalid_argument(
          "--decode snapshot keeps a state per drafted token and needs --draft");
    }
    return {};
  }
  if (source.empty())
    return invalid_argument("--draft is empty, expected none, ngram, mtp or a folder");
  if (source == "tree") {
    return unsupported("--draft tree: draft trees are not supported, drafts are chains of tokens");
  }
  RSSM_RETURN_IF_ERROR(parse_ngram(source).status());
  if (decode == DecodeMode::kPlain) {
    return invalid_argument("--decode plain has no state to go back to when a draft of --draft ",
                            source, " is rejected; expected replay, auto or snapshot");
  }
  if (decode != DecodeMode::kSnapshot && tokens + 1 > window) {
    return invalid_argument("--draft-tokens ", tokens, " makes rows of ", tokens + 1,
                            " tokens, which do not fit into --window ", window);
  }
  return {};
}

Result<LoadedDraft> load_draft(const Session& session, const std::string& source) {
  LoadedDraft draft{.source = source, .ngram = {}, .model = nullptr, .head = nullptr};
  if (source == "none") return draft;
  RSSM_ASSIGN_OR_RETURN(draft.ngram, parse_ngram(source));
  if (draft.ngram) return draft;
  if (source == "mtp") {
    Result<std::unique_ptr<MtpHead>> head = session.model->load_mtp_head(*session.backend);
    if (!head.ok()) {
      return make_status(head.status().code(), "--draft mtp: ", session.folder, ": ",
                         head.status().message());
    }
    draft.head = std::move(head).value();
    return draft;
  }
  RSSM_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::load(source + "/tokenizer.json"));
  RSSM_RETURN_IF_ERROR(
      check_same_vocabulary(*session.tokenizer, session.folder, tokenizer, source));
  RSSM_ASSIGN_OR_RETURN(draft.model, load_model(source, *session.backend));
  const std::int64_t found = draft.model->description().vocab_size;
  const std::int64_t expected = session.model->description().vocab_size;
  if (found != expected) {
    return invalid_argument("--draft: ", source, " has a vocabulary of ", found, ", that of ",
                            session.folder, " is ", expected);
  }
  return draft;
}

Result<std::unique_ptr<DraftSource>> create_draft(const Session& session, const LoadedDraft& draft,
                                                  int tokens, std::int64_t context) {
  if (draft.source == "none") return std::unique_ptr<DraftSource>();
  if (draft.ngram) {
    RSSM_ASSIGN_OR_RETURN(std::unique_ptr<DraftSource> source, NgramDraft::create(*draft.ngram));
    return source;
  }
  if (draft.head != nullptr) {
    RSSM_ASSIGN_OR_RETURN(std::unique_ptr<DraftSource> source,
                          MtpDraft::create(draft.head, session.backend,
                                           {.draft_tokens = tokens, .context = context, .kv = {}}));
    return source;
  }
  RSSM_ASSIGN_OR_RETURN(
      std::unique_ptr<DraftSource> source,
      ModelDraft::create(draft.model, session.backend, session.context,
                         {.name = draft.source, .draft_tokens = tokens, .context = context}));
  return source;
}

}  // namespace replayssm::app
