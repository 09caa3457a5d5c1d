#include "stitch/rpc/archive.h"

#include <string>

namespace stitch {

std::uint64_t InArchive::read_size() {
  fingerprint_.mix(0x1000);
  std::uint64_t size = 0;
  raw(&size, sizeof(size));
  size = transport::to_wire_order(size);
  // Every element takes at least one byte, so a larger count cannot be true.
  if (size > remaining()) {
    throw Error(ErrorCode::invalid_argument, "a container announces " + std::to_string(size) +
                                                 " elements, but only " +
                                                 std::to_string(remaining()) + " bytes are left");
  }
  return size;
}

void InArchive::read_tensor(at::Tensor& tensor) {
  fingerprint_.mix(0x2000);
  std::uint32_t index = 0;
  raw(&index, sizeof(index));
  index = transport::to_wire_order(index);
  if (index >= message_.tensors.size()) {
    throw Error(ErrorCode::invalid_argument, "tensor " + std::to_string(index) +
                                                 " is wanted, the message has " +
                                                 std::to_string(message_.tensors.size()));
  }
  tensor = message_.tensors[index];
}

void InArchive::check_seal() {
  std::uint16_t written = 0;
  raw(&written, sizeof(written));
  if (transport::to_wire_order(written) != static_cast<std::uint16_t>(fingerprint_.value())) {
    throw Error(ErrorCode::invalid_argument, "its fields are of other types");
  }
}

void InArchive::expect_end() const {
  if (remaining() != 0)
    throw Error(ErrorCode::invalid_argument, std::to_string(remaining()) + " bytes are left over");
}

void InArchive::fail_short(std::size_t wanted) const {
  throw Error(ErrorCode::invalid_argument, std::to_string(wanted) + " bytes are wanted, " +
                                               std::to_string(remaining()) + " are left");
}

void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const Error& error) {
  archive(static_cast<std::uint8_t>(error.code()), error.remote(), std::string(error.what()),
          error.worker(), error.function());
}

void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, Error& error) {
  std::uint8_t code = 0;
  bool remote = false;
  std::string text;
  std::string worker;
  std::string function;
  archive(code, remote, text, worker, function);
  if (code == 0 || code > static_cast<std::uint8_t>(ErrorCode::internal))
    code = static_cast<std::uint8_t>(ErrorCode::internal);
  error = Error(static_cast<ErrorCode>(code), std::move(text))
              .with_remote(remote)
              .with_worker(std::move(worker))
              .with_function(std::move(function));
}

}  // namespace stitch
