#include "runtime/saved_session.h"

#include <cstring>

#include "core/byte_io.h"
#include "io/quote.h"

namespace replayssm {
namespace {

constexpr char kMagic[8] = {'R', 'S', 'S', 'M', 'S', 'E', 'S', 'S'};
constexpr std::uint32_t kVersion = 1;

}  // namespace

Result<std::vector<std::byte>> save_session(const Engine& engine,
                                            const Conversation& conversation) {
  RSSM_ASSIGN_OR_RETURN(const std::vector<std::byte> image, engine.save(conversation.sequence));
  ByteWriter out;
  constexpr std::size_t kHeader = 128;
  out.reserve(kHeader + engine.model_id().size() +
              conversation.tokens.size() * sizeof(std::int32_t) + image.size());
  out.bytes(kMagic, sizeof kMagic);
  out.value(kVersion);
  out.text(engine.model_id());
  out.value(static_cast<std::uint64_t>(conversation.tokens.size()));
  for (const std::int32_t token : conversation.tokens) out.value(token);
  out.value(conversation.seed);
  out.value(conversation.drawn);
  out.value(static_cast<std::uint64_t>(image.size()));
  out.bytes(image.data(), image.size());
  return out.finish();
}

Result<SavedSession> SavedSession::parse(std::span<const std::byte> bytes,
                                         const std::string& name) {
  constexpr std::size_t kSmallest = sizeof kMagic + sizeof kVersion + sizeof(std::uint64_t);
  if (bytes.size() < kSmallest) {
    return data_loss(name, ": a session of ", bytes.size(), " bytes, expected at least ",
                     kSmallest);
  }
  if (std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0) {
    return data_loss(name, ": does not begin with 'RSSMSESS', so it is no saved session");
  }
  ByteReader in(bytes.first(bytes.size() - sizeof(std::uint64_t)));
  in.bytes(sizeof kMagic);
  if (const auto version = in.value<std::uint32_t>(); version != kVersion) {
    return unsupported(name, ": session has version ", version, ", expected ", kVersion);
  }
  RSSM_RETURN_IF_ERROR(check_checksum(bytes, name + ": session"));
  SavedSession session;
  session.name_ = name;
  session.model_id_ = in.text();
  const auto count = in.value<std::uint64_t>();
  if (count > in.rest() / sizeof(std::int32_t)) {
    return data_loss(name, ": session of ", count, " tokens has ", in.rest(), " bytes for them");
  }
  session.tokens_.resize(static_cast<std::size_t>(count));
  for (std::int32_t& token : session.tokens_) token = in.value<std::int32_t>();
  session.seed_ = in.value<std::uint64_t>();
  session.drawn_ = in.value<std::uint64_t>();
  const auto size = in.value<std::uint64_t>();
  if (!in.ok() || size != in.rest()) {
    return data_loss(name, ": session has ", in.rest(), " bytes of state, expected ", size);
  }
  const auto image = in.bytes(in.rest());
  session.image_.assign(image.begin(), image.end());
  return session;
}

Result<Conversation> SavedSession::restore(Engine& engine) const {
  if (model_id_ != engine.model_id()) {
    return invalid_argument(name_, ": session is of model ", quote(model_id_), ", expected ",
                            quote(engine.model_id()));
  }
  for (const std::int32_t token : tokens_) {
    if (token < 0 || token >= engine.model().vocab_size) {
      return data_loss(name_, ": session has token id ", token, ", expected 0..",
                       engine.model().vocab_size - 1);
    }
  }
  Conversation conversation{.tokens = tokens_, .seed = seed_, .drawn = drawn_};
  RSSM_ASSIGN_OR_RETURN(conversation.sequence, engine.open());
  Status status = engine.load(conversation.sequence, image_);
  if (status.ok()) {
    const Result<std::int64_t> position = engine.position(conversation.sequence);
    const auto size = static_cast<std::int64_t>(tokens_.size());
    if (!position.ok() || (*position != size && *position != size - 1)) {
      status = data_loss("session has ", size, " tokens and a state after ",
                         position.ok() ? *position : -1);
    }
  }
  if (status.ok()) return conversation;
  RSSM_RETURN_IF_ERROR(engine.close(conversation.sequence));
  return make_status(status.code(), name_, ": ", status.message());
}

}  // namespace replayssm
