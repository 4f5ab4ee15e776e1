// Sessions on disk: a conversation with the state of its sequence, to go on with later, on this or
// another machine.
//
//   magic, version | model id | tokens | seed and count of random numbers | image of the sequence
//   | FNV-1a 64 of everything before
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/generate.h"

namespace replayssm {

/// The bytes of a session. The conversation's sequence stays open.
Result<std::vector<std::byte>> save_session(const Engine& engine, const Conversation& conversation);

/// A session that has been read; it needs an engine to go on.
class SavedSession {
 public:
  /// Checks magic, version and checksum; `name` is what messages call it.
  static Result<SavedSession> parse(std::span<const std::byte> bytes, const std::string& name);

  const std::vector<std::int32_t>& tokens() const { return tokens_; }

  /// Opens a sequence of `engine` with the saved state. Refuses a session of another model, of
  /// other types, or longer than the context, by both values; no sequence is opened then.
  Result<Conversation> restore(Engine& engine) const;

 private:
  std::string name_;
  std::string model_id_;
  std::vector<std::int32_t> tokens_;
  std::uint64_t seed_ = 0;
  std::uint64_t drawn_ = 0;
  std::vector<std::byte> image_;
};

}  // namespace replayssm
