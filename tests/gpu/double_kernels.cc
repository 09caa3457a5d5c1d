#include "tests/gpu/double_kernels.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/gpu/double_torch_device.h"
#include "tests/gpu/kernels_host_run.h"

namespace stitch::testing::double_device {

namespace {

namespace cuda = transport::gpu::cuda;
using transport::gpu::KernelTable;
using transport::gpu::PackedTensor;
using transport::gpu::SparseRule;
using transport::gpu::SparseUpdate;
using Kernel = transport::gpu::test::FakeGpu::Kernel;

constexpr int kOnlyProcess = 0;

std::atomic<int> pack_launches{0};
std::atomic<int> row_launches{0};

int launch(int device, void* stream, Kernel kernel) {
  const auto& api = gpu().cuda(kOnlyProcess);
  int outer = 0;
  if (const int status = api.get_device(&outer)) return status;
  if (const int status = api.set_device(device)) return status;
  const auto on = static_cast<cuda::Stream>(stream);
  const int status = gpu().launch(kOnlyProcess, on, std::move(kernel));
  static_cast<void>(api.set_device(outer));
  return status;
}

const void* pointer(std::uint64_t address) { return reinterpret_cast<const void*>(address); }

int pack(int device, const PackedTensor* tensors, std::size_t count, void* packed,
         std::uint64_t packed_bytes, std::uint32_t*, void* stream) {
  ++pack_launches;
  Kernel kernel;
  kernel.name = "pack";
  kernel.writes.push_back({packed, packed_bytes});
  const std::vector<PackedTensor> all(tensors, tensors + count);
  for (const auto& each : all) {
    std::int64_t last = 0;
    for (std::int32_t d = 0; d < each.dimensions; ++d)
      last += (each.sizes[d] - 1) * each.strides[d];
    kernel.reads.push_back(
        {pointer(each.address), static_cast<std::size_t>(last + 1) * each.element_bytes});
  }
  kernel.body = [all, packed, packed_bytes] {
    const auto run = transport::gpu::kernels::run_pack<true>(
        all, reinterpret_cast<std::uintptr_t>(packed), packed_bytes);
    EXPECT_EQ(run.status, 0);
  };
  return launch(device, stream, std::move(kernel));
}

int sparse_workspace(int, std::int64_t count, std::int64_t rows, std::int64_t columns,
                     std::uint64_t* bytes) {
  using namespace transport::gpu::kernels;
  *bytes = 0;
  if (const int status = check_shape(count, rows, columns)) return status;
  if (count > 0 && columns > 0) *bytes = sparse_layout(count, columns).sort;
  return transport::gpu::kKernelSuccess;
}

// As in sparse.cu, but for the sort.
int sparse_update(int device, const SparseUpdate* update, std::uint32_t*, void* stream) {
  transport::gpu::kernels::SparseArguments arguments;
  if (const int status = transport::gpu::kernels::plan_sparse(*update, &arguments)) return status;
  if (update->count == 0 || update->columns == 0) return transport::gpu::kKernelSuccess;
  std::uint64_t needed = 0;
  if (const int status =
          sparse_workspace(device, update->count, update->rows, update->columns, &needed))
    return status;
  if (update->workspace_bytes < needed) return transport::gpu::kKernelSmallWorkspace;
  if (update->workspace % transport::gpu::kPackedAlignment != 0)
    return transport::gpu::kKernelMisaligned;
  ++row_launches;
  const auto table = [](std::uint64_t address, std::int64_t rows, std::int64_t stride) {
    return transport::gpu::test::FakeGpu::Bytes{
        pointer(address), static_cast<std::size_t>(rows * stride) * sizeof(float)};
  };
  Kernel kernel;
  kernel.name = "sparse_update";
  kernel.reads = {
      table(update->gradients, update->count, update->gradients_stride),
      {pointer(update->indices), static_cast<std::size_t>(update->count) * sizeof(std::int64_t)}};
  kernel.writes = {table(update->weights, update->rows, update->weights_stride),
                   {pointer(update->workspace), update->workspace_bytes}};
  const bool per_row = update->rule == SparseRule::rowwise_adagrad;
  for (const std::uint64_t state : {update->first_state, update->second_state}) {
    if (state != 0)
      kernel.writes.push_back(table(state, update->rows, per_row ? 1 : update->state_stride));
  }
  kernel.body = [copy = *update] { EXPECT_EQ(transport::gpu::kernels::run_sparse(copy), 0); };
  return launch(device, stream, std::move(kernel));
}

int load(int) { return transport::gpu::kKernelSuccess; }
const char* describe(int) { return "an error of the double"; }

constexpr int kNoKernelImage = 209;  // cudaErrorNoKernelImageForDevice
constexpr int kDeviceWithoutImage = 1;
int load_but_for_one(int device) { return device == kDeviceWithoutImage ? kNoKernelImage : 0; }
int pack_but_for_one(int device, const PackedTensor* tensors, std::size_t count, void* packed,
                     std::uint64_t packed_bytes, std::uint32_t* errors, void* stream) {
  if (device == kDeviceWithoutImage) return kNoKernelImage;
  return pack(device, tensors, count, packed, packed_bytes, errors, stream);
}
int update_nothing(int, const SparseUpdate*, std::uint32_t*, void*) { return kNoKernelImage; }

std::atomic<int> failing_loads{0};
std::atomic<int> load_status{0};
int load_later(int) { return failing_loads.fetch_sub(1) > 0 ? load_status.load() : 0; }
// The rows of the second half of the indices are left as they are.
int update_halfway(int device, const SparseUpdate* update, std::uint32_t* errors, void* stream) {
  SparseUpdate half = *update;
  half.count = update->count / 2;
  const int status = sparse_update(device, &half, errors, stream);
  return status != 0 ? status : transport::gpu::kKernelCutShort;
}

KernelTable make_table() {
  KernelTable made{};
  made.abi = transport::gpu::kKernelAbi;
  made.bytes = sizeof(made);
  made.pack = &pack;
  made.sparse_workspace = &sparse_workspace;
  made.sparse_update = &sparse_update;
  made.load = &load;
  made.describe = &describe;
  return made;
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable table = make_table();
  return table;
}

const KernelTable& kernels_without_image(Says when) {
  static const KernelTable at_load = [] {
    KernelTable made = make_table();
    made.load = &load_but_for_one;
    return made;
  }();
  static const KernelTable at_use = [] {
    KernelTable made = make_table();
    made.pack = &pack_but_for_one;
    made.sparse_update = &update_nothing;
    return made;
  }();
  return when == Says::at_load ? at_load : at_use;
}

const KernelTable& kernels_that_fail_to_load(int status, int times) {
  load_status = status;
  failing_loads = times;
  static const KernelTable table = [] {
    KernelTable made = make_table();
    made.load = &load_later;
    return made;
  }();
  return table;
}

const KernelTable& kernels_that_stop_halfway() {
  static const KernelTable table = [] {
    KernelTable made = make_table();
    made.sparse_update = &update_halfway;
    return made;
  }();
  return table;
}

int packings() { return pack_launches; }
int row_updates() { return row_launches; }

}  // namespace stitch::testing::double_device
