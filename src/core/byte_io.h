// Packed little-endian bytes with a checksum at the end: what saved states and sessions are made
// of.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "replayssm/status.h"

namespace replayssm {

static_assert(std::endian::native == std::endian::little, "saved bytes are little-endian");

/// FNV-1a, 64 bits. `hash`: that of the bytes before.
inline std::uint64_t fnv1a(std::span<const std::byte> bytes,
                           std::uint64_t hash = 0xcbf29ce484222325u) {
  for (const std::byte b : bytes) {
    hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3u;
  }
  return hash;
}

class ByteWriter {
 public:
  /// Large images are not to be moved as they grow.
  void reserve(std::size_t size) { out_.reserve(size); }
  void bytes(const void* data, std::size_t size) {
    const auto* p = static_cast<const std::byte*>(data);
    out_.insert(out_.end(), p, p + size);
  }
  template <typename T>
  void value(T x) {
    bytes(&x, sizeof x);
  }
  void text(const std::string& s) {
    value(static_cast<std::uint32_t>(s.size()));
    bytes(s.data(), s.size());
  }
  std::vector<std::byte> take() && { return std::move(out_); }
  /// Everything, with the checksum of it at the end.
  std::vector<std::byte> finish() {
    value(fnv1a(out_));
    return std::move(out_);
  }

 private:
  std::vector<std::byte> out_;
};

/// Reads past the end yield zeros and a failed ok(), so that one check at the end suffices.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> in) : in_(in) {}

  bool ok() const { return ok_; }
  std::size_t rest() const { return in_.size(); }

  std::span<const std::byte> bytes(std::size_t size) {
    if (size > in_.size()) {
      ok_ = false;
      in_ = {};
      return {};
    }
    const auto taken = in_.first(size);
    in_ = in_.subspan(size);
    return taken;
  }
  template <typename T>
  T value() {
    T x{};
    const auto taken = bytes(sizeof x);
    if (taken.size() == sizeof x) std::memcpy(&x, taken.data(), sizeof x);
    return x;
  }
  std::string text() {
    const auto size = value<std::uint32_t>();
    const auto taken = bytes(size);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

 private:
  std::span<const std::byte> in_;
  bool ok_ = true;
};

/// kDataLoss, with both checksums, unless `bytes` (at least 8) end in the checksum of the rest.
inline Status check_checksum(std::span<const std::byte> bytes, const std::string& what) {
  const std::uint64_t expected = fnv1a(bytes.first(bytes.size() - sizeof(std::uint64_t)));
  const auto found = ByteReader(bytes.last(sizeof expected)).value<std::uint64_t>();
  if (found == expected) return {};
  return data_loss(what, " is truncated or corrupt: checksum ", found, ", expected ", expected);
}

}  // namespace replayssm
