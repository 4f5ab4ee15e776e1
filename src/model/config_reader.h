// Typed reading of a Hugging Face config.json with errors that name the key.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "replayssm/dtype.h"
#include "replayssm/status.h"

namespace replayssm {

/// A JSON object. The first key that is missing or out of its domain is remembered and every later
/// read returns a placeholder, so that a caller reads all it needs and checks status() once.
class ConfigReader {
 public:
  /// `text`: the file's contents, where Python's Infinity and NaN may stand for numbers; `name` is
  /// what messages call the file.
  static Result<ConfigReader> parse(std::string_view text, std::string name);

  ConfigReader(ConfigReader&&) noexcept;
  ConfigReader& operator=(ConfigReader&&) noexcept;
  ~ConfigReader();

  const Status& status() const { return status_; }
  void fail(Status status);

  /// The key is present and not null.
  bool has(std::string_view key) const;

  /// Required: in [low, high].
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high);
  std::int64_t integer_or(std::string_view key, std::int64_t low, std::int64_t high,
                          std::int64_t fallback);
  double number_or(std::string_view key, double low, double high, double fallback);
  bool boolean_or(std::string_view key, bool fallback);
  std::string string_or(std::string_view key, std::string_view fallback);
  std::vector<std::string> strings(std::string_view key);
  std::vector<double> numbers(std::string_view key);
  /// A number or a list of numbers; empty if absent or null.
  std::vector<std::int64_t> integers(std::string_view key);
  /// Required: an object, as a reader of its own with a status of its own. Messages call it by both
  /// names.
  Result<ConfigReader> object(std::string_view key) const;

  const std::string& name() const { return name_; }

 private:
  struct Json;
  ConfigReader(std::unique_ptr<Json> json, std::string name);

  Status refused(std::string_view key, std::string_view expected) const;
  void fail_key(std::string_view key, std::string_view expected);

  std::unique_ptr<Json> json_;
  std::string name_;
  Status status_;
};

}  // namespace replayssm
