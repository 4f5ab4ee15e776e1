// A progress bar on stderr, if that is a terminal.
#pragma once

#include <string>

namespace replayssm::app {

/// Erases itself when it is done or destroyed. Work that is over quickly shows nothing.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(double done, double total);

 private:
  void erase();

  std::string what_;
  bool terminal_;
  bool drawn_ = false;
  double start_;
  double last_ = 0;
};

}  // namespace replayssm::app
