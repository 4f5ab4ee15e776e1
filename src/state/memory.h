// Large zero-filled memory for pools.
#pragma once

#include <cstddef>
#include <memory>

namespace replayssm {

/// `bytes` of zeros aligned to 64 or more, touched only when used and backed by huge pages where
/// the system offers them (a state is megabytes, read front to back every token). Null on failure.
std::shared_ptr<std::byte> reserve_memory(std::size_t bytes);

}  // namespace replayssm
