#include "text/stream_decoder.h"

#include <algorithm>
#include <utility>

#include "text/utf8.h"

namespace replayssm {

Result<std::string> StreamDecoder::push(std::int32_t id) {
  RSSM_ASSIGN_OR_RETURN(const std::string_view bytes, tokenizer_->token_bytes(id));
  if (skip_special_ && tokenizer_->is_special(id)) return std::string();
  return push_bytes(bytes);
}

std::string StreamDecoder::push_bytes(std::string_view bytes) {
  tail_ += bytes;
  std::string text;
  tail_.erase(0, append_utf8_lossy(tail_, &text));
  return text;
}

std::string StreamDecoder::finish() {
  if (tail_.empty()) return std::string();
  tail_.clear();
  return std::string(kReplacementCharacter);
}

Result<StopStrings> StopStrings::create(std::vector<std::string> stops) {
  StopStrings result;
  for (std::string& text : stops) {
    if (text.empty()) return invalid_argument("stop string ", result.stops_.size(), " is empty");
    if (const std::size_t at = find_invalid_utf8(text); at != std::string::npos) {
      return invalid_argument("stop string ", result.stops_.size(), " is not valid UTF-8 at byte ",
                              at);
    }
    Stop stop;
    stop.border.assign(text.size(), 0);
    for (std::size_t i = 1, k = 0; i < text.size(); ++i) {
      while (k > 0 && text[i] != text[k]) k = stop.border[k - 1];
      if (text[i] == text[k]) ++k;
      stop.border[i] = k;
    }
    stop.text = std::move(text);
    result.stops_.push_back(std::move(stop));
  }
  return result;
}

std::string StopStrings::push(std::string_view text) {
  if (stopped()) return std::string();
  held_ += text;
  const std::size_t pushed = held_.size();
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::size_t longest = 0;
    for (std::size_t j = 0; j < stops_.size(); ++j) {
      Stop& stop = stops_[j];
      while (stop.matched > 0 && stop.text[stop.matched] != text[i]) {
        stop.matched = stop.border[stop.matched - 1];
      }
      if (stop.text[stop.matched] == text[i]) ++stop.matched;
      if (stop.matched == stop.text.size() && stop.text.size() > longest) {
        longest = stop.text.size();
        stopped_ = static_cast<int>(j);
      }
    }
    if (longest > 0) {
      const std::size_t end = pushed - text.size() + i + 1;
      held_.resize(end - longest);
      return std::exchange(held_, std::string());
    }
  }
  std::size_t keep = 0;
  for (const Stop& stop : stops_) keep = std::max(keep, stop.matched);
  std::string shown = held_.substr(0, pushed - keep);
  held_.erase(0, pushed - keep);
  return shown;
}

std::string StopStrings::finish() { return std::exchange(held_, std::string()); }

}  // namespace replayssm
