#include "stitch/rpc/message/archive.h"

#include <string>

#include "stitch/rpc/message/message.h"

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

OutArchive::OutArchive(OutMessage& message)
    : OutputArchive(this), message_(message), body_(message.frame.body()) {}

void OutArchive::write_tensor(const at::Tensor& tensor) {
  fingerprint_.mix(0x2000);
  const auto index = static_cast<std::uint32_t>(message_.tensors.size());
  const auto written = base::to_wire_order(index);
  body_.append(&written, sizeof(written));
  if (tensor.defined() && !tensor.is_cpu()) [[unlikely]]
    message_.placements.push_back({index, seals_ + 1});
  message_.tensors.push_back(tensor);
}

void OutArchive::write_tensor(const at::Tensor& tensor, c10::Device device) {
  write_tensor(tensor);
  if (!tensor.defined()) return;
  auto& placements = message_.placements;
  if (tensor.is_cpu())
    placements.push_back({static_cast<std::uint32_t>(message_.tensors.size() - 1), seals_ + 1});
  placements.back().wanted = device;
}

std::span<const std::byte> result_in(const InMessage& reply) noexcept {
  return reply.view.body().subspan(sizeof(std::uint64_t));
}

std::shared_ptr<const ArrivedMemory> memory_of(const InMessage& message) noexcept {
  return message.arrival ? message.arrival->memory : nullptr;
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

namespace {

enum class ScalarKind : std::uint8_t { boolean = 1, integer = 2, floating = 3, complex = 4 };

}  // namespace

void write_scalar(OutArchive& archive, const at::Scalar& scalar) {
  archive.mark(FieldMark::scalar);
  if (scalar.isBoolean()) {
    archive(ScalarKind::boolean, scalar.toBool());
  } else if (scalar.isIntegral(false)) {
    archive(ScalarKind::integer, scalar.toLong());
  } else if (scalar.isFloatingPoint()) {
    archive(ScalarKind::floating, scalar.toDouble());
  } else if (scalar.isComplex()) {
    archive(ScalarKind::complex, scalar.toComplexDouble());
  } else {
    throw Error(ErrorCode::invalid_argument, "a symbolic at::Scalar cannot be sent");
  }
}

at::Scalar read_scalar(InArchive& archive) {
  archive.mark(FieldMark::scalar);
  const auto read = [&]<class T>(T value) {
    archive(value);
    return at::Scalar(value);
  };
  const std::uint8_t kind = [&] {
    std::uint8_t code = 0;
    archive(code);
    return code;
  }();
  switch (static_cast<ScalarKind>(kind)) {
    case ScalarKind::boolean:
      return read(false);
    case ScalarKind::integer:
      return read(std::int64_t{0});
    case ScalarKind::floating:
      return read(0.0);
    case ScalarKind::complex:
      return read(c10::complex<double>());
  }
  throw Error(ErrorCode::invalid_argument,
              "an at::Scalar is of kind " + std::to_string(kind) + ", known are 1 to 4");
}

void write_device(OutArchive& archive, at::Device device) {
  archive.mark(FieldMark::device);
  archive(static_cast<std::uint8_t>(device.type()), static_cast<std::int8_t>(device.index()));
}

at::Device read_device(InArchive& archive) {
  archive.mark(FieldMark::device);
  std::uint8_t type = 0;
  std::int8_t index = 0;
  archive(type, index);
  const auto named = static_cast<at::DeviceType>(type);
  const bool is_known = type < static_cast<std::uint8_t>(at::COMPILE_TIME_MAX_DEVICE_TYPES);
  if (!is_known || index < -1 || (named == at::kCPU && index > 0)) {
    throw Error(ErrorCode::invalid_argument, "no device is of type " + std::to_string(type) +
                                                 " and index " + std::to_string(index));
  }
  return {named, index};
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
  if (code == 0 || code > static_cast<std::uint8_t>(ErrorCode::already_exists))
    code = static_cast<std::uint8_t>(ErrorCode::internal);
  error = Error(static_cast<ErrorCode>(code), std::move(text))
              .with_remote(remote)
              .with_worker(std::move(worker))
              .with_function(std::move(function));
}

}  // namespace stitch::rpc
