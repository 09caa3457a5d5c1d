#include "stitch/rpc/options/security_options.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "stitch/base/descriptor.h"
#include "stitch/base/error.h"
#include "stitch/rpc/options/option_name.h"
#include "stitch/rpc/options/options.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch {

namespace {

// `subject` is the option or the variable that has it.
Encryption encryption_of(const std::string& subject, const std::string& name) {
  const auto encryption = transport::encryption_named(name);
  if (!encryption) {
    throw Error(ErrorCode::invalid_argument, subject + " is \"" + name + "\"; allowed: on, off");
  }
  return *encryption;
}

}  // namespace

EncryptionChoice::EncryptionChoice(const std::string& name)
    : encryption_(encryption_of("encryption", name)) {}

namespace rpc {

namespace {

constexpr std::size_t kMaxSecretBytes = 4096;

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::invalid_argument, text);
}

// A secret of nothing but blanks is a mistake in a script, never a choice.
void check_not_blank(const std::string& secret, const std::string& what) {
  if (secret.find_first_not_of(" \t\r\n") == std::string::npos) {
    refuse(what + (secret.empty() ? " is set but empty" : " has nothing but blanks") +
           ": give all workers the same secret, or unset it to run without one");
  }
}

const std::string* find_tensorpipe(const std::vector<std::string>& transports) {
  const auto found = std::find_if(transports.begin(), transports.end(), [](const auto& name) {
    return name == "tensorpipe-shm" || name == "uv";
  });
  return found == transports.end() ? nullptr : &*found;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "localhost" || address == "::1" ||
         address == "[::1]";
}

}  // namespace

bool insecure_is_allowed() {
  const char* value = std::getenv("STITCH_INSECURE");
  const std::string text = value == nullptr ? "0" : value;
  if (text != "1" && text != "0" && !text.empty())
    refuse("STITCH_INSECURE is \"" + text + "\"; allowed: 1, 0");
  return text == "1";
}

void wipe(std::string& secret) noexcept {
  secret.resize(secret.capacity());  // takes no memory
  sodium_memzero(secret.data(), secret.size());
  secret.clear();
}

void wipe(std::optional<std::string>& secret) noexcept {
  if (secret) wipe(*secret);
  secret.reset();
}

std::string read_secret_file(const std::string& path) {
  const std::string what = "STITCH_SECRET_FILE \"" + path + '"';
  // A fifo would wait for a writer.
  const base::Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) refuse(what + " cannot be opened: " + std::strerror(errno));
  struct stat about {};
  if (::fstat(file.get(), &about) != 0 || !S_ISREG(about.st_mode))
    refuse(what + " is no regular file");
  if (about.st_uid != ::geteuid() && about.st_uid != 0) {
    refuse(what + " belongs to user " + std::to_string(about.st_uid) + "; allowed: user " +
           std::to_string(::geteuid()) + " and root");
  }
  if ((about.st_mode & 077) != 0) {
    std::array<char, 16> mode{};
    std::snprintf(mode.data(), mode.size(), "%04o", static_cast<unsigned>(about.st_mode & 07777));
    refuse(what + " has mode " + mode.data() +
           ", so that others than its owner can use it; "
           "allowed: 0400, 0600");
  }
  std::string text(kMaxSecretBytes + 1, '\0');
  const SecretWiper wiper(text);
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t count = ::read(file.get(), text.data() + size, text.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse(what + " cannot be read: " + std::strerror(errno));
    if (count == 0) break;
    size += static_cast<std::size_t>(count);
  }
  if (size > kMaxSecretBytes)
    refuse(what + " has more than " + std::to_string(kMaxSecretBytes) + " bytes");
  if (size > 0 && text[size - 1] == '\n') --size;
  if (size > 0 && text[size - 1] == '\r') --size;
  std::string secret = text.substr(0, size);
  check_not_blank(secret, what);
  return secret;
}

void check_tensorpipe_address(const std::vector<std::string>& transports,
                              const std::string& address) {
  const std::string* const found = find_tensorpipe(transports);
  if (found == nullptr || is_loopback(address) || insecure_is_allowed()) return;
  refuse(option_name("transports") + " has \"" + *found + "\", which is refused where " + address +
         " is listened on: TensorPipe's own protocol trusts any peer that reaches its port; use "
         "shm and tcp, or set STITCH_INSECURE=1");
}

void resolve_security(Options& options) {
  static_cast<void>(insecure_is_allowed());  // refuses a value that says neither
  const char* secret = std::getenv("STITCH_SECRET");
  const char* file = std::getenv("STITCH_SECRET_FILE");
  if (secret != nullptr && file != nullptr)
    refuse("STITCH_SECRET and STITCH_SECRET_FILE are both set: set one of them");
  if (secret != nullptr) check_not_blank(secret, "STITCH_SECRET");
  if (file != nullptr && *file == '\0') refuse("STITCH_SECRET_FILE is set but empty");
  if (options.secret) {
    check_not_blank(*options.secret, "secret");
  } else if (secret != nullptr) {
    options.secret = secret;
  } else if (file != nullptr) {
    std::string text = read_secret_file(file);
    const SecretWiper wiper(text);
    options.secret = text;
  }
  // The user has chosen TensorPipe, and not the secret that stitch-run has made.
  const std::string* const tensorpipe = find_tensorpipe(options.transports);
  if (tensorpipe != nullptr && options.secret &&
      options.secret->starts_with(transport::SecretKey::kRandomSecret)) {
    wipe(*options.secret);
    options.secret.reset();
  }
  if (const char* text = std::getenv("STITCH_ENCRYPTION"); text != nullptr && !options.encryption) {
    options.encryption = encryption_of("STITCH_ENCRYPTION", text);
    note_set_by_variable("STITCH_ENCRYPTION");
  }
  if (!options.encryption) options.encryption = options.secret ? Encryption::on : Encryption::off;
  if (!options.secret && *options.encryption != Encryption::off) {
    refuse(
        option_name("encryption") + " is \"" +
        std::string(transport::name_of(*options.encryption)) +
        "\" without a secret: its keys come from one; set STITCH_SECRET_FILE or STITCH_SECRET to "
        "the same value on all workers");
  }
  if (tensorpipe != nullptr && options.secret && !insecure_is_allowed()) {
    refuse(option_name("transports") + " has \"" + *tensorpipe +
           "\", which is refused with a secret: TensorPipe's own protocol trusts any peer that "
           "reaches its port, and nothing it carries is encrypted; use shm and tcp, or set "
           "STITCH_INSECURE=1");
  }
}

}  // namespace rpc

}  // namespace stitch
