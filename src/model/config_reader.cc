#include "model/config_reader.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "io/quote.h"

namespace replayssm {
namespace {

/// The JSON library copies and prints values recursively, so nesting is limited before it sees any.
constexpr int kMaxNesting = 64;

/// Python writes Infinity and NaN, which JSON does not have. Outside of strings they become a
/// number beyond any limit and a string, which no number is read from.
Result<std::string> with_json_numbers(std::string_view text, const std::string& name) {
  std::string out;
  out.reserve(text.size());
  bool in_string = false;
  int nesting = 0;
  for (std::size_t i = 0; i < text.size();) {
    if (in_string && text[i] == '\\' && i + 1 < text.size()) {
      out.append(text.substr(i, 2));
      i += 2;
      continue;
    }
    if (text[i] == '"') in_string = !in_string;
    if (!in_string && (text[i] == '[' || text[i] == '{') && ++nesting > kMaxNesting) {
      return data_loss(name, ": nested more than ", kMaxNesting, " levels deep");
    }
    if (!in_string && (text[i] == ']' || text[i] == '}')) --nesting;
    if (!in_string && text.substr(i).starts_with("Infinity")) {
      out += "1e308";
      i += 8;
    } else if (!in_string && text.substr(i).starts_with("NaN")) {
      out += "\"NaN\"";
      i += 3;
    } else {
      out += text[i++];
    }
  }
  return out;
}

/// How transformers 5 writes an infinite number into a configuration.
const nlohmann::json kInfinityObject = {{"__float__", "Infinity"}};

std::string shown(const nlohmann::json& value) {
  return quote(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

struct ConfigReader::Json {
  nlohmann::json object;

  const nlohmann::json* find(std::string_view key) const {
    const auto it = object.find(std::string(key));
    return it == object.end() || it->is_null() ? nullptr : &*it;
  }
};

ConfigReader::ConfigReader(std::unique_ptr<Json> json, std::string name)
    : json_(std::move(json)), name_(std::move(name)) {}
ConfigReader::ConfigReader(ConfigReader&&) noexcept = default;
ConfigReader& ConfigReader::operator=(ConfigReader&&) noexcept = default;
ConfigReader::~ConfigReader() = default;

Result<ConfigReader> ConfigReader::parse(std::string_view text, std::string name) {
  auto json = std::make_unique<Json>();
  RSSM_ASSIGN_OR_RETURN(const std::string standard, with_json_numbers(text, name));
  json->object = nlohmann::json::parse(standard, nullptr, false);
  if (json->object.is_discarded()) return data_loss(name, ": not valid JSON");
  if (!json->object.is_object()) {
    return data_loss(name, ": holds a JSON ", json->object.type_name(), ", expected an object");
  }
  return ConfigReader(std::move(json), std::move(name));
}

void ConfigReader::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
}

Status ConfigReader::refused(std::string_view key, std::string_view expected) const {
  const nlohmann::json* value = json_->find(key);
  return invalid_argument(name_, ": ", key, " is ",
                          value == nullptr ? std::string("missing") : shown(*value), ", expected ",
                          expected);
}

void ConfigReader::fail_key(std::string_view key, std::string_view expected) {
  fail(refused(key, expected));
}

bool ConfigReader::has(std::string_view key) const { return json_->find(key) != nullptr; }

std::int64_t ConfigReader::integer(std::string_view key, std::int64_t low, std::int64_t high) {
  const nlohmann::json* value = json_->find(key);
  if (value != nullptr && value->is_number_integer() &&
      !(value->is_number_unsigned() &&
        value->get<std::uint64_t>() > std::uint64_t(std::numeric_limits<std::int64_t>::max()))) {
    const auto number = value->get<std::int64_t>();
    if (number >= low && number <= high) return number;
  }
  fail_key(key, "an integer in " + std::to_string(low) + ".." + std::to_string(high));
  return low;
}

std::int64_t ConfigReader::integer_or(std::string_view key, std::int64_t low, std::int64_t high,
                                      std::int64_t fallback) {
  return has(key) ? integer(key, low, high) : fallback;
}

double ConfigReader::number_or(std::string_view key, double low, double high, double fallback) {
  const nlohmann::json* value = json_->find(key);
  if (value == nullptr) return fallback;
  if (value->is_number()) {
    const auto number = value->get<double>();
    if (number >= low && number <= high) return number;
  }
  std::ostringstream expected;
  expected << "a number in " << low << ".." << high;
  fail_key(key, expected.str());
  return fallback;
}

bool ConfigReader::boolean_or(std::string_view key, bool fallback) {
  const nlohmann::json* value = json_->find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  fail_key(key, "true or false");
  return fallback;
}

std::string ConfigReader::string_or(std::string_view key, std::string_view fallback) {
  const nlohmann::json* value = json_->find(key);
  if (value == nullptr) return std::string(fallback);
  if (value->is_string()) return value->get<std::string>();
  fail_key(key, "a string");
  return std::string(fallback);
}

std::vector<std::string> ConfigReader::strings(std::string_view key) {
  std::vector<std::string> out;
  const nlohmann::json* value = json_->find(key);
  if (value != nullptr && value->is_array()) {
    for (const nlohmann::json& item : *value) {
      if (!item.is_string()) break;
      out.push_back(item.get<std::string>());
    }
    if (out.size() == value->size()) return out;
  }
  fail_key(key, "a list of strings");
  return {};
}

std::vector<double> ConfigReader::numbers(std::string_view key) {
  std::vector<double> out;
  const nlohmann::json* value = json_->find(key);
  if (value != nullptr && value->is_array()) {
    for (const nlohmann::json& item : *value) {
      if (item.is_number()) {
        out.push_back(item.get<double>());
      } else if (item == kInfinityObject) {
        out.push_back(std::numeric_limits<double>::infinity());
      } else {
        break;
      }
    }
    if (out.size() == value->size()) return out;
  }
  fail_key(key, "a list of numbers");
  return {};
}

std::vector<std::int64_t> ConfigReader::integers(std::string_view key) {
  const nlohmann::json* value = json_->find(key);
  if (value == nullptr) return {};
  const nlohmann::json list = value->is_array() ? *value : nlohmann::json::array({*value});
  std::vector<std::int64_t> out;
  for (const nlohmann::json& item : list) {
    if (!item.is_number_integer()) {
      fail_key(key, "an integer or a list of integers");
      return {};
    }
    out.push_back(item.get<std::int64_t>());
  }
  return out;
}

Result<ConfigReader> ConfigReader::object(std::string_view key) const {
  const nlohmann::json* value = json_->find(key);
  if (value == nullptr || !value->is_object()) return refused(key, "an object");
  auto json = std::make_unique<Json>();
  json->object = *value;
  return ConfigReader(std::move(json), name_ + ": " + std::string(key));
}

}  // namespace replayssm
