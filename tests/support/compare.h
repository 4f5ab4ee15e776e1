// Comparisons that say where two results differ.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "replayssm/status.h"

namespace replayssm::testing {

/// "(2, 0, 7)": the coordinates of a flat index in a shape, last dimension fastest.
inline std::string coordinates(std::size_t index, std::span<const std::int64_t> shape) {
  std::vector<std::int64_t> position(shape.size());
  auto rest = static_cast<std::int64_t>(index);
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    position[axis] = rest % shape[axis];
    rest /= shape[axis];
  }
  std::string text = "(";
  for (std::size_t axis = 0; axis < position.size(); ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(position[axis]);
  }
  return text + ")";
}

/// norm(got - want) / norm(want) <= bound, after the positions of NaN and infinity agree. A want of
/// all zeros is met by zeros only.
inline ::testing::AssertionResult close(std::span<const float> got, std::span<const double> want,
                                        double bound, std::span<const std::int64_t> shape) {
  if (got.size() != want.size()) {
    return ::testing::AssertionFailure()
           << got.size() << " values, expected " << want.size() << " values";
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto found = static_cast<double>(got[i]);
    if (std::isnan(found) != std::isnan(want[i]) || std::isinf(found) != std::isinf(want[i])) {
      return ::testing::AssertionFailure()
             << "at " << coordinates(i, shape) << ": found " << found << ", expected " << want[i];
    }
  }
  double difference = 0.0;
  double reference = 0.0;
  std::size_t worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    const double w = static_cast<double>(got[worst]) - want[worst];
    if (std::abs(d) > std::abs(w)) worst = i;
    difference += d * d;
    reference += want[i] * want[i];
  }
  difference = std::sqrt(difference);
  reference = std::sqrt(reference);
  if (difference <= bound * reference) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "norm(diff) / norm(ref) is " << difference / reference << ", bound " << bound
         << "; worst at " << coordinates(worst, shape) << ": found " << got[worst] << ", expected "
         << want[worst];
}

/// Equal bit patterns.
inline ::testing::AssertionResult same_bits(std::span<const float> got, std::span<const float> want,
                                            std::span<const std::int64_t> shape = {}) {
  if (got.size() != want.size()) {
    return ::testing::AssertionFailure()
           << got.size() << " values, expected " << want.size() << " values";
  }
  std::size_t count = 0;
  std::size_t first = 0;
  for (std::size_t i = got.size(); i-- > 0;) {
    if (std::bit_cast<std::uint32_t>(got[i]) == std::bit_cast<std::uint32_t>(want[i])) continue;
    ++count;
    first = i;
  }
  if (count == 0) return ::testing::AssertionSuccess();
  const std::int64_t flat[] = {static_cast<std::int64_t>(got.size())};
  return ::testing::AssertionFailure()
         << count << " of " << got.size() << " values differ; first at "
         << coordinates(first, shape.empty() ? std::span<const std::int64_t>(flat) : shape)
         << ": found " << got[first] << ", expected " << want[first];
}

/// Equal bytes; `element` is the size of what the bytes are, so that the coordinate names one.
inline ::testing::AssertionResult same_bytes(std::span<const std::byte> got,
                                             std::span<const std::byte> want,
                                             std::size_t element = 1) {
  if (got.size() != want.size()) {
    return ::testing::AssertionFailure()
           << got.size() << " bytes, expected " << want.size() << " bytes";
  }
  if (got.empty() || std::memcmp(got.data(), want.data(), got.size()) == 0) {
    return ::testing::AssertionSuccess();
  }
  std::size_t count = 0;
  std::size_t first = 0;
  for (std::size_t i = got.size(); i-- > 0;) {
    if (got[i] == want[i]) continue;
    ++count;
    first = i;
  }
  return ::testing::AssertionFailure()
         << count << " of " << got.size() << " bytes differ; first in element " << first / element
         << " (byte " << first << "): found " << static_cast<int>(got[first]) << ", expected "
         << static_cast<int>(want[first]);
}

inline ::testing::AssertionResult is_ok(const Status& status) {
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << to_string(status.code()) << ": " << status.message();
}
template <typename T>
::testing::AssertionResult is_ok(const Result<T>& result) {
  return is_ok(result.status());
}

/// Refused with this code, in one line that contains every one of `parts`.
inline ::testing::AssertionResult refused(const Status& status, StatusCode code,
                                          std::initializer_list<std::string> parts = {}) {
  if (status.ok()) return ::testing::AssertionFailure() << "accepted, expected a refusal";
  if (status.code() != code) {
    return ::testing::AssertionFailure() << "code is " << to_string(status.code()) << ", expected "
                                         << to_string(code) << ": " << status.message();
  }
  if (status.message().empty() || status.message().find('\n') != std::string::npos) {
    return ::testing::AssertionFailure() << "not one line: '" << status.message() << "'";
  }
  for (const std::string& part : parts) {
    if (status.message().find(part) == std::string::npos) {
      return ::testing::AssertionFailure()
             << "'" << status.message() << "' does not contain '" << part << "'";
    }
  }
  return ::testing::AssertionSuccess();
}
template <typename T>
::testing::AssertionResult refused(const Result<T>& result, StatusCode code,
                                   std::initializer_list<std::string> parts = {}) {
  return refused(result.ok() ? Status{} : result.status(), code, parts);
}

}  // namespace replayssm::testing
