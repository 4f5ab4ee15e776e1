#include "text/pretokenizer.h"

#include <algorithm>
#include <utility>

#include "text/utf8.h"

namespace replayssm {
void PreTokenizer::add_split(Regex pattern, SplitBehavior behavior, bool invert) {
  Step& step = steps_.emplace_back();
  step.kind = Step::Kind::kRegex;
  step.regex = std::move(pattern);
  step.behavior = behavior;
  step.invert = invert;
}

void PreTokenizer::add_split(std::string literal, SplitBehavior behavior, bool invert) {
  Step& step = steps_.emplace_back();
  step.kind = Step::Kind::kLiteral;
  step.literal = std::move(literal);
  step.behavior = behavior;
  step.invert = invert;
}

void PreTokenizer::add_prefix_space() { steps_.emplace_back(); }

Status PreTokenizer::split(std::string_view text, Scratch& scratch) const {
  scratch.pieces.clear();
  if (!text.empty()) scratch.pieces.push_back(text);
  for (const Step& step : steps_) {
    if (step.kind == Step::Kind::kPrefixSpace) {
      prefix_pieces(scratch);
      continue;
    }
    scratch.next.clear();
    for (const std::string_view piece : scratch.pieces) {
      RSSM_RETURN_IF_ERROR(find_spans(step, piece, scratch));
      merge_spans(step.behavior, &scratch.spans);
      for (const Span& span : scratch.spans) {
        if (span.match && step.behavior == SplitBehavior::kRemoved) continue;
        if (span.begin == span.end) continue;
        scratch.next.push_back(piece.substr(span.begin, span.end - span.begin));
      }
    }
    scratch.pieces.swap(scratch.next);
  }
  return Status();
}

/// Covers `text` with spans that match and spans between matches.
Status PreTokenizer::find_spans(const Step& step, std::string_view text, Scratch& scratch) {
  std::vector<Span>& spans = scratch.spans;
  spans.clear();
  std::size_t covered = 0;
  std::size_t from = 0;
  while (from <= text.size()) {
    Regex::Match match;
    if (step.kind == Step::Kind::kRegex) {
      RSSM_ASSIGN_OR_RETURN(match, step.regex->find(text, from, scratch.regex));
    } else if (const std::size_t at = text.find(step.literal, from); at != text.npos) {
      match = {true, at, at + step.literal.size()};
    }
    if (!match.found) break;
    if (match.begin == match.end && match.end == covered && covered > 0) {
      // An empty match right behind the last one: look again one character on.
      from += from < text.size() ? read_utf8(text, from).length : 1;
      continue;
    }
    if (match.begin > covered) spans.push_back({covered, match.begin, step.invert});
    spans.push_back({match.begin, match.end, !step.invert});
    covered = match.end;
    from = match.end;
    if (match.begin == match.end) from += from < text.size() ? read_utf8(text, from).length : 1;
  }
  if (covered < text.size()) spans.push_back({covered, text.size(), step.invert});
  return Status();
}

void PreTokenizer::merge_spans(SplitBehavior behavior, std::vector<Span>* spans) {
  if (behavior == SplitBehavior::kRemoved || behavior == SplitBehavior::kIsolated) return;
  const bool backwards = behavior == SplitBehavior::kMergedWithNext;
  if (backwards) std::reverse(spans->begin(), spans->end());
  std::size_t kept = 0;
  bool previous_match = false;
  for (const Span& span : *spans) {
    const bool join = behavior == SplitBehavior::kContiguous ? span.match == previous_match
                                                             : span.match && !previous_match;
    previous_match = span.match;
    if (join && kept > 0) {
      Span& last = (*spans)[kept - 1];
      last.begin = std::min(last.begin, span.begin);
      last.end = std::max(last.end, span.end);
    } else {
      (*spans)[kept++] = span;
    }
  }
  spans->resize(kept);
  if (backwards) std::reverse(spans->begin(), spans->end());
}

void PreTokenizer::prefix_pieces(Scratch& scratch) {
  std::size_t size = 0;
  for (const std::string_view piece : scratch.pieces) size += piece.size() + 1;
  scratch.prefixed.clear();
  scratch.prefixed.reserve(size);  // the pieces will point into it
  for (std::string_view& piece : scratch.pieces) {
    const std::size_t begin = scratch.prefixed.size();
    if (piece.front() != ' ') scratch.prefixed += ' ';
    scratch.prefixed += piece;
    piece = std::string_view(scratch.prefixed).substr(begin);
  }
}

}  // namespace replayssm
