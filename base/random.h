#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace stitch::base {

// Random numbers fit for keys, from libsodium. Thread contract: any thread.

// Prepares libsodium; it is ready after the first call. To be called before functions of libsodium.
// Throws Error(internal) when the system has no source of random numbers.
void start_sodium();

// Fills `bytes` with random bytes. Throws as start_sodium().
void fill_random(std::span<std::byte> bytes);

// A random number. Throws as start_sodium().
[[nodiscard]] std::uint64_t random_number();

}  // namespace stitch::base
