#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "stitch/rpc/gpu/device_gate.h"
#include "stitch/rpc/gpu/host_copy.h"
#include "stitch/rpc/gpu/sent_memory.h"
#include "stitch/rpc/gpu/tensor_transfers.h"

namespace stitch::rpc {

namespace {

namespace gpu_cuda = transport::gpu::cuda;
using c10::impl::VirtualGuardImpl;

// Tensors of a packed buffer begin at its multiples, which suit the elements of each type.
constexpr std::uint64_t kPackedAlignment = 256;

void check_status(const transport::gpu::CudaApi& api, gpu_cuda::Status status, c10::Device device,
                  const char* what) {
  if (status == gpu_cuda::kSuccess) return;
  const std::string text = api.get_error_string(status);
  static_cast<void>(api.get_last_error());
  throw Error(ErrorCode::internal, "device " + device.str() + " has failed: " + what + ": " + text);
}

// Without gaps, the dimensions in their order.
std::vector<std::int64_t> dense_strides(const at::Tensor& tensor) {
  return at::infer_dense_strides(tensor.sizes(), tensor.strides());
}

}  // namespace

void TensorTransfers::refuse_capture(c10::Device device) const {
  const c10::DeviceGuard on(device);
  const auto stream =
      static_cast<gpu_cuda::Stream>(bridge_.raw(VirtualGuardImpl(c10::kCUDA).getStream(device)));
  gpu_cuda::CaptureStatus capture = gpu_cuda::kCaptureNone;
  check_status(cuda_, cuda_.stream_is_capturing(stream, &capture), device, "its stream");
  if (capture == gpu_cuda::kCaptureNone) return;
  throw Error(ErrorCode::invalid_argument, "a call cannot be made while a stream of device " +
                                               device.str() + " is being captured");
}

// When the bytes of one device are there. It ends on that device, on any thread: see DeviceEvent.
struct OutgoingTransfers::Event {
  const transport::gpu::CudaApi& api;
  const c10::Device device;
  const gpu_cuda::Stream stream;
  gpu_cuda::Event event = nullptr;

  Event(const transport::gpu::CudaApi& table, c10::Device of, gpu_cuda::Stream recorded_on)
      : api(table), device(of), stream(recorded_on) {}
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (event == nullptr) return;
    try {
      const c10::DeviceGuard on(device);
      if (api.event_destroy(event) != gpu_cuda::kSuccess) static_cast<void>(api.get_last_error());
    } catch (const std::exception&) {
      // The device is lost, and its events with it.
    }
  }
};

// What a transfer keeps.
struct OutgoingTransfers::Stash final : SentMemory {
  std::shared_ptr<Event> ready;

  [[nodiscard]] bool stream_is_idle() const noexcept override {
    const gpu_cuda::Status status = ready->api.stream_query(ready->stream);
    if (status != gpu_cuda::kSuccess) static_cast<void>(ready->api.get_last_error());
    return status == gpu_cuda::kSuccess;
  }
};

void OutgoingTransfers::describe(std::uint32_t tensor, const at::Tensor& original,
                                 const at::Tensor& sent, at::ScalarType type,
                                 at::IntArrayRef strides) {
  TransferSection::Tensor described;
  described.tensor = tensor;
  described.dtype = type;
  described.requires_grad = original.requires_grad();
  described.sizes = original.sizes().vec();
  described.strides = strides.vec();
  for (std::size_t d = 0; d < described.sizes.size(); ++d) {
    if (sent.sizes()[d] != described.sizes[d]) described.strides[d] = 0;  // expanded: sent once
  }
  section_.tensors.push_back(std::move(described));
}

void OutgoingTransfers::add(std::uint32_t tensor, const at::Tensor& original, c10::Device there,
                            std::optional<at::ScalarType> cast) {
  // Its owner may drop it once the call is made, and its memory may belong to another stream than
  // the one that reads it below.
  const VirtualGuardImpl cuda(c10::kCUDA);
  cuda.recordDataPtrOnStream(original.storage().data_ptr(), cuda.getStream(original.device()));
  at::Tensor source = each_element_once(original);
  const at::ScalarType type = cast.value_or(source.scalar_type());
  const std::size_t bytes = static_cast<std::size_t>(source.numel()) * c10::elementSize(type);
  if (bytes < kPackBelow) {
    describe(tensor, original, source, type, dense_strides(source));
    small_[{source.device().index(), there.index()}].push_back(
        {section_.tensors.size() - 1, std::move(source)});
    return;
  }
  if (cast) source = source.to(type);
  if (!source.is_non_overlapping_and_dense()) source = source.clone(at::MemoryFormat::Preserve);
  describe(tensor, original, source, type, source.strides());
  section_.tensors.back().transfer = static_cast<std::uint32_t>(pieces_.size());
  pieces_.push_back({source, source.device(), there});
}

void OutgoingTransfers::pack(c10::Device from, c10::Device to, const std::vector<Small>& tensors) {
  std::uint64_t end = 0;
  for (const Small& each : tensors) {
    TransferSection::Tensor& described = section_.tensors[each.described];
    described.transfer = static_cast<std::uint32_t>(pieces_.size());
    described.offset = (end + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
    end = described.offset +
          static_cast<std::uint64_t>(each.source.numel()) * c10::elementSize(described.dtype);
  }
  end = (end + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
  const at::Tensor buffer = at::empty({static_cast<std::int64_t>(end)},
                                      at::TensorOptions().dtype(at::kByte).device(from));
  for (const Small& each : tensors) {
    const TransferSection::Tensor& described = section_.tensors[each.described];
    over_storage(buffer.storage(), described.dtype, each.source.sizes(), dense_strides(each.source),
                 described.offset)
        .copy_(each.source, true);
  }
  pieces_.push_back({buffer, from, to});
}

base::Bytes OutgoingTransfers::seal() {
  for (const auto& [devices, tensors] : small_) {
    pack(c10::Device(c10::kCUDA, devices.first), c10::Device(c10::kCUDA, devices.second), tensors);
  }
  small_.clear();
  if (pieces_.size() > TransferSection::kMaxTransfers) {
    throw Error(ErrorCode::out_of_range,
                std::to_string(pieces_.size()) +
                    " tensors from devices are too many for a message, at most " +
                    std::to_string(TransferSection::kMaxTransfers) + " of 1 MiB and more go");
  }
  std::map<c10::DeviceIndex, std::shared_ptr<Event>> events;
  for (Piece& piece : pieces_) {
    std::shared_ptr<Event>& ready = events[piece.from.index()];
    if (ready == nullptr) {
      const auto& api = transfers_.cuda_;
      const c10::DeviceGuard on(piece.from);
      const auto stream = static_cast<gpu_cuda::Stream>(
          transfers_.bridge_.raw(VirtualGuardImpl(c10::kCUDA).getStream(piece.from)));
      ready = std::make_shared<Event>(api, piece.from, stream);
      check_status(api, api.event_create_with_flags(&ready->event, gpu_cuda::kEventDisableTiming),
                   piece.from, "an event");
      check_status(api, api.event_record(ready->event, stream), piece.from, "an event");
    }
    piece.ready = ready;
    section_.transfers.push_back({transfers_.transfers_->new_id(), piece.bytes.nbytes(), piece.to});
  }
  return section_.encode();
}

void OutgoingTransfers::begin(const WorkerInfo& to,
                              const std::shared_ptr<void>& until_ended) noexcept {
  try {
    const auto peer = transfers_.peer_id(to);
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      Piece& piece = pieces_[i];
      auto stash = std::make_shared<Stash>();
      stash->bytes = std::move(piece.bytes);
      stash->ready = std::move(piece.ready);
      const transport::gpu::DeviceSpan span{piece.from.index(), stash->bytes.data_ptr(),
                                            stash->bytes.nbytes()};
      const gpu_cuda::Event ready = stash->ready->event;
      std::shared_ptr<const SentMemory> kept = std::move(stash);
      // Its receiver reports what fails.
      transport::gpu::DeviceTransfers::Done done;
      if (until_ended) done = [until_ended](const std::optional<Error>&) {};
      transfers_.transfers_->send(section_.transfers[i].id, peer, piece.to.index(), span, ready,
                                  std::shared_ptr<const void>(std::move(kept)), std::move(done));
    }
  } catch (const Error& error) {
    transfers_.hooks_.give_up(to, error.with_prefix("tensors on devices cannot be sent"));
  }
}

}  // namespace stitch::rpc
