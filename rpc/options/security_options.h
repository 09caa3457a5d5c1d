#pragma once

#include <optional>
#include <string>
#include <vector>

#include "stitch/rpc/options/options.h"

namespace stitch::rpc {

// Fills `secret` from STITCH_SECRET or the file that STITCH_SECRET_FILE names, and `encryption`
// from STITCH_ENCRYPTION or its default. Throws Error(invalid_argument) for what would protect less
// than it seems: an empty secret, two of them, a file that others can read, encryption without a
// secret, and transports of TensorPipe's with one.
void resolve_security(Options& options);

// The text of a file that only its owner, who is this user or root, can read, without the newline
// at its end. Throws Error(invalid_argument) otherwise, naming the file and what is wrong.
[[nodiscard]] std::string read_secret_file(const std::string& path);

// Throws Error(invalid_argument) when a transport of TensorPipe's is among them and could be
// reached from elsewhere: `address` is the one that is listened on.
void check_tensorpipe_address(const std::vector<std::string>& transports,
                              const std::string& address);

// Whether STITCH_INSECURE=1 allows what is refused otherwise.
[[nodiscard]] bool insecure_is_allowed();

// Overwrites all of its memory and empties it. A short string that was moved from still has its
// text there.
void wipe(std::string& secret) noexcept;
void wipe(std::optional<std::string>& secret) noexcept;

// Wipes a string, or one that may be missing, at the end of its block, also when something throws.
template <class Secret>
class SecretWiper {
 public:
  explicit SecretWiper(Secret& secret) noexcept : secret_(secret) {}
  ~SecretWiper() { wipe(secret_); }
  SecretWiper(const SecretWiper&) = delete;
  SecretWiper& operator=(const SecretWiper&) = delete;

 private:
  Secret& secret_;
};

}  // namespace stitch::rpc
