#include "stitch/rpc/message/archive.h"

#include <string>

namespace stitch::rpc {

void fail_nesting() {
  throw Error(ErrorCode::invalid_argument,
              "a value has more than " + std::to_string(kMaxNesting) +
                  " structs, containers and pointers inside one another");
}

void fail_elements_without_bytes() {
  throw Error(ErrorCode::invalid_argument, "containers have more than " +
                                               std::to_string(kMaxElementsWithoutBytes) +
                                               " elements that take no bytes");
}

void fail_element_memory(ErrorCode code, std::size_t body_bytes) {
  throw Error(code, "elements of containers take more than " +
                        std::to_string(max_element_memory(body_bytes)) +
                        " bytes of memory, for a message of " + std::to_string(body_bytes) +
                        " bytes");
}

std::size_t InArchive::read_count(std::size_t bytes_each) {
  fingerprint_.mix(0x1000);
  std::uint64_t count = 0;
  raw(&count, sizeof(count));
  count = base::to_wire_order(count);
  const std::size_t most = bytes_each == 0
                               ? remaining() + kMaxElementsWithoutBytes - elements_without_bytes_
                               : remaining() / bytes_each;
  if (count > most) {
    throw Error(ErrorCode::invalid_argument,
                "a container announces " + std::to_string(count) + " elements" +
                    (bytes_each > 1 ? " of " + std::to_string(bytes_each) + " bytes" : "") +
                    ", but only " + std::to_string(remaining()) + " bytes are left");
  }
  return static_cast<std::size_t>(count);
}

void InArchive::read_tensor(at::Tensor& tensor) {
  fingerprint_.mix(0x2000);
  std::uint32_t index = 0;
  raw(&index, sizeof(index));
  index = base::to_wire_order(index);
  if (index >= message_.tensors.size()) {
    throw Error(ErrorCode::invalid_argument, "tensor " + std::to_string(index) +
                                                 " is wanted, the message has " +
                                                 std::to_string(message_.tensors.size()));
  }
  if (index != next_tensor_) {
    throw Error(ErrorCode::invalid_argument, "tensor " + std::to_string(index) +
                                                 " is wanted, the next one is " +
                                                 std::to_string(next_tensor_));
  }
  tensor = message_.tensors[next_tensor_++];
}

void InArchive::check_seal() {
  std::uint16_t written = 0;
  raw(&written, sizeof(written));
  if (base::to_wire_order(written) != static_cast<std::uint16_t>(fingerprint_.value())) {
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

}  // namespace stitch::rpc
