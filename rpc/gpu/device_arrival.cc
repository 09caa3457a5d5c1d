// DeviceTensors: what arrives.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>

#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/gpu/device_tensors.h"
#include "stitch/rpc/gpu/host_copy.h"
#include "stitch/rpc/gpu/tensor_transfers.h"
#include "stitch/rpc/gpu/wire_cast.h"
#include "stitch/rpc/gpu/wire_device.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::rpc {

namespace {

void add_memory(ArrivedMemory& memory, const at::Tensor& tensor, c10::Device device) {
  if (tensor.is_sparse()) {
    memory.add(tensor._indices().storage(), device);
    memory.add(tensor._values().storage(), device);
  } else {
    memory.add(tensor.storage(), device);
  }
}

}  // namespace

struct DeviceTensors::Received {
  Announced announced{};                   // null: no transfers
  std::vector<c10::Storage> memory{};      // by transfer
  std::optional<Error> error{};            // why they have not come
  std::shared_ptr<void> acknowledgment{};  // see Arrival
  [[nodiscard]] const std::vector<TransferSection::Tensor>& tensors() const {
    static const std::vector<TransferSection::Tensor> kNone;
    return announced ? announced->tensors : kNone;
  }
};

std::vector<ArrivedTensor> DeviceTensors::read_section(const InMessage& message,
                                                       std::set<std::uint32_t>& cast) const {
  base::ByteReader in(message.view.section(wire::kDevices)->bytes, "section of devices");
  constexpr std::size_t kEntryBytes = 8;
  std::vector<ArrivedTensor> tensors;
  const auto entries = in.read_count(kEntryBytes);
  for (std::uint32_t i = 0; i < entries; ++i) {
    const auto tensor = in.read<std::uint32_t>();
    const auto here = read_device(in);
    bool travels_cast = false;
    const auto there = read_device(in, &travels_cast);
    if (!tensors.empty() && tensors.back().tensor >= tensor)
      throw Error(ErrorCode::protocol, "section of devices names its tensors in no order");
    tensors.push_back({tensor, here, there});
    if (travels_cast) cast.insert(tensor);
  }
  in.expect_end();
  return tensors;
}

DeviceTensors::Announced DeviceTensors::announced(const InMessage& message) const {
  const auto* const bytes = message.view.section(wire::kTransfers);
  if (bytes == nullptr) return nullptr;
  auto section = std::make_shared<const TransferSection>(TransferSection::decode(bytes->bytes));
  if (!transfers_)
    throw Error(ErrorCode::protocol,
                "message names device transfers, of which this worker has none");
  return section;
}

// The message makes sense, but not here: as where a device has no memory, its call fails alone.
Error DeviceTensors::no_such_device(const std::string& what, c10::Device device) const {
  return Error(ErrorCode::invalid_argument,
               what + " is for device " + device.str() + " of worker \"" + own_name_ +
                   "\", which has the CPU and " + std::to_string(own_.count) + " CUDA devices");
}

void DeviceTensors::refuse_transfers(const WorkerInfo& from, const Announced& transfers,
                                     const Error& why) {
  if (transfers) transfers_->refuse(from, *transfers, why);
}

void DeviceTensors::receive(const std::shared_ptr<InMessage>& message, const Announced& transfers,
                            Next next) {
  if (transfers) {
    receive_transfers(message, transfers, std::move(next));
    return;
  }
  // Not on the thread that reads, however small it is: to allocate and to copy may wait for the
  // device, maybe for a transfer whose peer waits for what that thread has to read next.
  watch_.then(nullptr, [this, message, received = std::make_shared<Received>(),
                        next = std::move(next)](const std::optional<Error>& stopped) mutable {
    place(message, std::move(next), received, stopped);
  });
}

// Asked for at once, on the thread that reads: the source's other transfers may wait for them.
void DeviceTensors::receive_transfers(const std::shared_ptr<InMessage>& message,
                                      const Announced& transfers, Next next) {
  for (const auto& each : transfers->transfers) {
    if (!own_.has(each.to))
      throw no_such_device("a transfer of " + std::to_string(each.bytes) + " bytes", each.to);
  }
  watch_.start();  // here, where it is an error of this message if there is no thread
  const auto received = std::make_shared<Received>(Received{transfers});
  transfers_->receive(message->from, *transfers,
                      [this, message, received, next = std::move(next)](
                          std::vector<c10::Storage> memory, const std::optional<Error>& error,
                          std::shared_ptr<void> acknowledgment) mutable {
                        received->memory = std::move(memory);
                        received->error = error;
                        received->acknowledgment = std::move(acknowledgment);
                        // Not on a lane, which serves all transfers of its device.
                        watch_.then(nullptr, [this, message, received, next = std::move(next)](
                                                 const std::optional<Error>& stopped) mutable {
                          place(message, std::move(next), received, stopped);
                        });
                      });
}

void DeviceTensors::place(const std::shared_ptr<InMessage>& message, Next next,
                          const std::shared_ptr<Received>& come,
                          const std::optional<Error>& stopped) {
  if (stopped && stopped->code() == ErrorCode::shutting_down) {
    next(std::move(*message), stopped);
    return;
  }
  std::unique_ptr<DeviceGate> gate;
  bool open = true;
  auto arrival = std::make_unique<Arrival>();
  arrival->acknowledgment = std::move(come->acknowledgment);
  try {
    if (stopped) throw *stopped;
    const Received& received = *come;
    if (received.error && received.error->code() == ErrorCode::protocol &&
        !received.error->remote())
      throw *received.error;
    std::set<std::uint32_t> cast;
    auto tensors = read_section(*message, cast);
    decode_tensors(*message);
    put_received(*message, received);
    check_arrival(*message, tensors, cast, !received.error);
    arrival->tensors = std::move(tensors);
    arrival->error = received.error;
    for (const auto& each : arrival->tensors) {
      if (arrival->error || own_.has(each.here)) continue;
      arrival->error = no_such_device("tensor " + std::to_string(each.tensor + 1) + " of " +
                                          std::to_string(message->tensors.size()),
                                      each.here);
    }
    message->arrival = std::move(arrival);
    gate = std::make_unique<DeviceGate>();
    if (!message->arrival->error) put_on_devices(*message, *gate, received, cast);
    open = gate->open();
  } catch (...) {
    const Error failed = to_error(std::current_exception());
    if (failed.code() == ErrorCode::protocol) return next(std::move(*message), failed);
    // What does not come for another reason, memory of a device say, is an error of the call.
    if (arrival) message->arrival = std::move(arrival);
    message->arrival->error = failed;
    open = true;
  }
  if (open) {
    finish_arrival(message, next, std::nullopt);
    return;
  }
  watch_.then(std::move(gate),
              [this, message, next = std::move(next)](const std::optional<Error>& error) mutable {
                finish_arrival(message, next, error);
              });
}

void DeviceTensors::check_arrival(const InMessage& message,
                                  const std::vector<ArrivedTensor>& tensors,
                                  const std::set<std::uint32_t>& cast, bool transferred) {
  for (const auto& each : tensors) {
    if (each.tensor >= message.tensors.size() ||
        (transferred && !message.tensors[each.tensor].defined())) {
      throw Error(ErrorCode::protocol,
                  "section of devices names tensor " + std::to_string(each.tensor) + " of " +
                      std::to_string(message.tensors.size()) + ", or one that is undefined");
    }
    if (!transferred) continue;
    const at::Tensor& tensor = message.tensors[each.tensor];
    if (tensor.is_cpu() || tensor.device() == each.here) continue;
    throw Error(ErrorCode::protocol, "section of devices puts tensor " +
                                         std::to_string(each.tensor) + " on " + each.here.str() +
                                         ", its transfer has put it on " + tensor.device().str());
  }
  for (const std::uint32_t number : cast) {
    const at::Tensor& tensor = message.tensors[number];
    if (!tensor.defined() || may_be_widened(tensor)) continue;  // undefined: it has not come
    throw Error(ErrorCode::protocol, "section of devices has tensor " + std::to_string(number) +
                                         " cast from " + tensor.toString() +
                                         ", as which none travels");
  }
}

void DeviceTensors::put_received(InMessage& message, const Received& received) {
  for (const auto& each : received.tensors()) {
    if (each.tensor >= message.tensors.size() || message.tensors[each.tensor].defined()) {
      throw Error(ErrorCode::protocol,
                  "section of transfers names tensor " + std::to_string(each.tensor) + " of " +
                      std::to_string(message.tensors.size()) + ", or one that is in the message");
    }
    if (received.error) continue;
    at::Tensor& tensor = message.tensors[each.tensor];
    tensor = over_storage(received.memory[each.transfer], each.dtype, each.sizes, each.strides,
                          each.offset);
    if (each.requires_grad) tensor.set_requires_grad(true);
  }
}

at::Tensor DeviceTensors::put_on_device(const at::Tensor& host, c10::Device device, bool cast,
                                        DeviceGate& gate) {
  at::Tensor placed;
  if (host.is_sparse()) {
    const at::Tensor indices = to_device(host._indices(), device, gate);
    placed = make_coo(indices, to_device(host._values(), device, gate), host);
  } else {
    placed = to_device(host, device, gate);
  }
  if (cast) {
    gate.keep(placed);
    placed = widened(placed);
  }
  if (host.requires_grad()) placed.set_requires_grad(true);
  return placed;
}

std::string DeviceTensors::not_put(const InMessage& message, const ArrivedTensor& tensor,
                                   std::size_t bytes) const {
  return "tensor " + std::to_string(tensor.tensor + 1) + " of " +
         std::to_string(message.tensors.size()) + " (" + std::to_string(bytes) +
         " bytes) could not be put on device " + tensor.here.str() + " of worker \"" + own_name_ +
         "\"";
}

void DeviceTensors::put_on_devices(InMessage& message, DeviceGate& gate, const Received& received,
                                   const std::set<std::uint32_t>& cast) {
  const at::NoGradGuard no_grad;
  Arrival& arrival = *message.arrival;
  auto memory = std::make_shared<ArrivedMemory>();
  std::map<c10::DeviceIndex, std::size_t> bytes;
  std::map<c10::DeviceIndex, c10::Stream> streams;
  std::size_t total = 0;
  std::size_t from_devices = 0;  // to the CPU, cast
  std::string what = "tensors could not be put on their devices";
  try {
    for (const auto& each : arrival.tensors) {
      const at::Tensor host = message.tensors[each.tensor];
      const bool travelled_cast = cast.contains(each.tensor);
      if ((each.here.is_cpu() || host.is_cuda()) && !travelled_cast) continue;
      const std::size_t size =
          host.is_sparse() ? host._indices().nbytes() + host._values().nbytes() : host.nbytes();
      what = not_put(message, each, size);
      at::Tensor& placed = message.tensors[each.tensor];
      if (each.here.is_cpu()) {
        from_devices += host.is_sparse() ? 0 : size;
        placed = widened(host);
        continue;
      }
      const c10::Stream stream = copy_stream(each.here, Direction::received);
      streams.insert_or_assign(each.here.index(), stream);
      const c10::StreamGuard on(stream);
      if (host.is_cuda()) {  // it has come by a transfer
        gate.keep(host);
        placed = widened(host);
        continue;
      }
      note_device_in_use(each.here);
      bytes[each.here.index()] += size;
      total += size;
      placed = put_on_device(host, each.here, travelled_cast, gate);
      add_memory(*memory, placed, each.here);
    }
  } catch (const std::exception& exception) {
    arrival.error = device_error(what, exception);
  }
  try {
    for (const auto& [index, stream] : streams) gate.add(stream);
  } catch (const Error& error) {
    if (!arrival.error) arrival.error = error;
  }
  for (const auto& each : received.tensors()) {
    const c10::Device device = message.tensors[each.tensor].device();
    memory->add(message.tensors[each.tensor].storage(), device);
  }
  if (!bytes.empty() || !received.tensors().empty()) arrival.memory = std::move(memory);
  for (const auto& each : arrival.tensors) {
    if (each.here.is_cpu() && !each.there.is_cpu() && !cast.contains(each.tensor)) {
      const auto& tensor = message.tensors[each.tensor];
      if (!tensor.is_sparse()) total += tensor.nbytes();
    }
  }
  count(false, total + from_devices, message.from.id, bytes, cast.size());
}

// The device's current stream runs the copy, and owns the memory.
at::Tensor DeviceTensors::to_device(const at::Tensor& tensor, c10::Device device,
                                    DeviceGate& gate) {
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(device);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  // CUDA would copy much of what is not pinned itself, on this thread, which waits for all gates.
  const auto as_copied = [&](const at::Tensor& host) {
    const at::Tensor source = host.nbytes() > kInlineBytes ? pinned(host) : host;
    gate.keep(source);
    return source;
  };
  if (tensor.is_contiguous())
    return at::empty(tensor.sizes(), options).copy_(as_copied(tensor), true);
  // The device needs as much memory as has arrived, whatever the strides are. Not a view in the
  // eyes of autograd: the caller may change it in place.
  const at::AutoDispatchBelowADInplaceOrView plain;
  const at::Tensor source = as_copied(spanned_elements(tensor));
  const at::Tensor bytes = at::empty(source.sizes(), options).copy_(source, true);
  return bytes.as_strided(tensor.sizes(), tensor.strides(), 0);
}

void DeviceTensors::finish_arrival(const std::shared_ptr<InMessage>& message, Next& next,
                                   const std::optional<Error>& error) {
  if (error && error->code() == ErrorCode::shutting_down) {
    next(std::move(*message), error);
    return;
  }
  Arrival& arrival = *message->arrival;
  if (error && !arrival.error) arrival.error = error;
  if (arrival.error) {
    message->tensors.clear();
  } else if (arrival.memory) {
    // Code that gets them in ways that are not seen here most often works on the default streams.
    arrival.memory->use_on_default_streams();
  }
  next(std::move(*message), std::nullopt);
}

}  // namespace stitch::rpc
