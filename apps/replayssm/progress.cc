#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

namespace replayssm::app {
namespace {

constexpr double kPatience = 0.3;   // seconds before a bar appears
constexpr double kInterval = 0.05;  // seconds between two drawings
constexpr int kWidth = 40;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Progress::Progress(std::string what)
    : what_(std::move(what)), terminal_(isatty(STDERR_FILENO) != 0), start_(now()) {}

Progress::~Progress() { erase(); }

void Progress::show(double done, double total) {
  if (!terminal_ || total <= 0) return;
  const double time = now();
  if (done >= total) {
    erase();
    return;
  }
  if (time - start_ < kPatience || time - last_ < kInterval) return;
  last_ = time;
  drawn_ = true;
  const double share = std::clamp(done / total, 0.0, 1.0);
  const int filled = static_cast<int>(share * kWidth);
  std::fprintf(stderr, "\r%s [%s%s] %3.0f%%", what_.c_str(),
               std::string(static_cast<std::size_t>(filled), '#').c_str(),
               std::string(static_cast<std::size_t>(kWidth - filled), '.').c_str(), 100 * share);
  std::fflush(stderr);
}

void Progress::erase() {
  if (!drawn_) return;
  std::fprintf(stderr, "\r\x1b[K");
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace replayssm::app
