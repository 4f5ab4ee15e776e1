// Runs a program and keeps what it wrote.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "support/temp_dir.h"

namespace replayssm::testing {

struct ProgramResult {
  int status = -1;  // exit status; 128 + the signal that ended it
  std::string out;
  std::string err;
};

struct RunOptions {
  std::vector<std::pair<std::string, std::string>> environment = {};  // on top of this process's
  std::string stdout_to = {};  // a file instead of ProgramResult::out
  unsigned limit = 300;        // seconds until it is ended by SIGALRM
};

/// `arguments` without the program's own name.
inline ProgramResult run_program(const std::string& program, std::vector<std::string> arguments,
                                 const RunOptions& options = {}) {
  const TempDir folder;
  const std::string out = options.stdout_to.empty() ? folder / "out" : options.stdout_to;
  const std::string err = folder / "err";
  const auto redirect = [](const std::string& path, int target) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || ::dup2(fd, target) < 0) ::_exit(126);
  };
  arguments.insert(arguments.begin(), program);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  const pid_t child = ::fork();
  if (child == 0) {
    redirect(out, STDOUT_FILENO);
    redirect(err, STDERR_FILENO);
    for (const auto& [name, value] : options.environment) {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
    ::alarm(options.limit);
    ::execv(program.c_str(), argv.data());
    ::_exit(127);
  }
  EXPECT_GT(child, 0);
  ProgramResult result;
  int status = 0;
  if (child > 0 && ::waitpid(child, &status, 0) == child) {
    result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  if (options.stdout_to.empty()) result.out = read_text(out);
  result.err = read_text(err);
  return result;
}

}  // namespace replayssm::testing
