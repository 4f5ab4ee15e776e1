// Status and Result<T>: how every fallible call of the library reports. Nothing in the library
// throws across its interface, prints, aborts or exits.
//
//   Result<StatePool> pool = StatePool::create(options);
//   if (!pool.ok()) return pool.status();   // one line naming the thing, found and expected
#pragma once

#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace replayssm {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,     // a value that can never be right: wrong shape, T > L, slot out of range
  kFailedPrecondition,  // a call in the wrong order: commit without step, step on a freed slot
  kUnsupported,         // well formed, but no kernel or format here handles it
  kResourceExhausted,   // does not fit: memory, slots, workspace
  kNotFound,            // a file, tensor or key that is absent
  kDataLoss,            // truncated, corrupt or foreign data
  kInternal,
};

const char* to_string(StatusCode code);

/// Outcome of a call without a value. The message is one line without a trailing newline.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// Either a value or a Status that is not ok. `value()` may be called only when `ok()`.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

/// Builds a status whose message is its arguments written one after the other.
template <typename... Args>
Status make_status(StatusCode code, const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return Status(code, std::move(out).str());
}

template <typename... Args>
Status invalid_argument(const Args&... args) {
  return make_status(StatusCode::kInvalidArgument, args...);
}
template <typename... Args>
Status failed_precondition(const Args&... args) {
  return make_status(StatusCode::kFailedPrecondition, args...);
}
template <typename... Args>
Status unsupported(const Args&... args) {
  return make_status(StatusCode::kUnsupported, args...);
}
template <typename... Args>
Status resource_exhausted(const Args&... args) {
  return make_status(StatusCode::kResourceExhausted, args...);
}
template <typename... Args>
Status not_found(const Args&... args) {
  return make_status(StatusCode::kNotFound, args...);
}
template <typename... Args>
Status data_loss(const Args&... args) {
  return make_status(StatusCode::kDataLoss, args...);
}

#define RSSM_RETURN_IF_ERROR(expr)                                                          \
  do {                                                                                      \
    if (::replayssm::Status rssm_status_ = (expr); !rssm_status_.ok()) return rssm_status_; \
  } while (false)

#define RSSM_CONCAT_INNER(a, b) a##b
#define RSSM_CONCAT(a, b) RSSM_CONCAT_INNER(a, b)

/// RSSM_ASSIGN_OR_RETURN(auto x, f()): returns f's status if it failed, else moves its value to x.
#define RSSM_ASSIGN_OR_RETURN(lhs, expr) \
  RSSM_ASSIGN_OR_RETURN_IMPL(RSSM_CONCAT(rssm_result_, __LINE__), lhs, expr)
// NOLINTBEGIN(bugprone-macro-parentheses): `tmp` and `lhs` are declarations
#define RSSM_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                               \
  if (!tmp.ok()) return tmp.status();              \
  lhs = std::move(tmp).value()
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace replayssm
