#include <string>

#include "tests/gpu/device/device_memory.h"
#include "tests/gpu/device/kernel_check.h"
#include "tests/gpu/random_message.h"

namespace stitch::transport::gpu {
namespace {

using namespace kernels;

// The tensors of a message at their addresses on the device.
std::vector<PackedTensor> on_device(const Message& message, const DeviceMemory& memory) {
  std::vector<PackedTensor> placed = message.tensors;
  for (PackedTensor& tensor : placed) tensor.address += memory.address();
  return placed;
}

void expect(const KernelCheck& check, const char* what, int status) {
  if (status != 0)
    throw std::runtime_error(std::string(what) + ": " + check.table.describe(status));
}

void pack(const KernelCheck& check, const std::vector<PackedTensor>& tensors,
          const DeviceMemory& packed, std::uint32_t* errors, const Stream& stream) {
  expect(check, "pack",
         check.table.pack(check.device, tensors.data(), tensors.size(), packed.get(),
                          packed.bytes(), errors, stream.get()));
}
void unpack(const KernelCheck& check, const std::vector<PackedTensor>& tensors,
            const DeviceMemory& packed, std::uint32_t* errors, const Stream& stream) {
  expect(check, "unpack",
         check.table.unpack(check.device, tensors.data(), tensors.size(), packed.get(),
                            packed.bytes(), errors, stream.get()));
}

DeviceMemory copy_of(Arena& arena) {
  DeviceMemory memory(arena.bytes());
  memory.set(arena.at(0), arena.bytes());
  return memory;
}
Arena copy_of(const DeviceMemory& memory) {
  Arena arena(memory.bytes() - kUnitBytes);
  memory.get(arena.at(0), memory.bytes());
  return arena;
}

// A float of a random message may have any bits; numbers that are none keep no particular ones.
void make_numbers(Message& message, Arena& arena) {
  for (const PackedTensor& tensor : message.in(arena)) {
    if (tensor.cast == PackCast::none) continue;
    for_each_element(tensor, [&](std::uint64_t, std::int64_t offset) {
      auto* const at = reinterpret_cast<void*>(tensor.address + static_cast<std::uint64_t>(offset));
      std::uint32_t bits = 0;
      std::memcpy(&bits, at, sizeof bits);
      if ((bits & 0x7f800000U) == 0x7f800000U) bits &= 0x807fffffU;
      std::memcpy(at, &bits, sizeof bits);
    });
  }
}

// Packs a message, compares with the reference, unpacks into other memory and packs that.
std::string check_message(const KernelCheck& check, Message& message, std::mt19937_64& random) {
  Arena source(message.arena_bytes);
  source.randomize(random);
  make_numbers(message, source);
  const Stream stream;
  const DeviceMemory tensors = copy_of(source);
  Arena empty(message.packed_bytes);
  const DeviceMemory packed = copy_of(empty);
  pack(check, on_device(message, tensors), packed, nullptr, stream);
  stream.wait();
  Arena result = copy_of(packed);
  // The reference ends with the packed bytes; the arena behind them is as it was.
  if (!(result == packed_reference(message, source))) return "packed bytes differ";
  Arena poison(message.arena_bytes);
  const DeviceMemory target = copy_of(poison);
  const DeviceMemory again = copy_of(empty);
  unpack(check, on_device(message, target), packed, nullptr, stream);
  pack(check, on_device(message, target), again, nullptr, stream);
  stream.wait();
  if (!(copy_of(again) == result)) return "unpacked tensors, packed again, differ";
  // Nothing but elements may have changed: with these as they were, the memory is as before.
  Arena written = copy_of(target);
  for (const PackedTensor& tensor : message.in(written)) {
    for_each_element(tensor, [&](std::uint64_t, std::int64_t offset) {
      std::memset(reinterpret_cast<void*>(tensor.address + static_cast<std::uint64_t>(offset)),
                  kPoison, tensor.element_bytes);
    });
  }
  return written == poison ? "" : "unpacking wrote beside the tensors";
}

void check_random(const KernelCheck& check) {
  std::mt19937_64 random(1);
  std::string why;
  for (int round = 0; round < check.rounds && why.empty(); ++round) {
    Message message = random_message(random);
    why = check_message(check, message, random);
    if (!why.empty()) why += " in round " + std::to_string(round);
  }
  check.report.check("pack and unpack random tensors", why);
}

PackedTensor dense(std::initializer_list<std::int64_t> sizes, std::uint32_t element_bytes) {
  PackedTensor tensor{};
  tensor.element_bytes = element_bytes;
  for (const std::int64_t size : sizes) tensor.sizes[tensor.dimensions++] = size;
  std::int64_t stride = 1;
  for (int d = tensor.dimensions - 1; d >= 0; --d) {
    tensor.strides[d] = stride;
    stride *= tensor.sizes[d];
  }
  return tensor;
}

void check_many(const KernelCheck& check) {
  std::mt19937_64 random(2);
  std::string why;
  for (const int count : {2032, 5000}) {
    Message message;
    for (int i = 0; i < count; ++i)
      message.add(dense({1 + static_cast<std::int64_t>(random() % 600)}, 1), random() % 16);
    const std::string found = check_message(check, message, random);
    if (!found.empty()) why = found + " with " + std::to_string(count) + " tensors";
  }
  check.report.check("pack and unpack thousands of small tensors", why);
}

void check_rows(const KernelCheck& check) {
  std::mt19937_64 random(3);
  std::string why;
  for (const std::int64_t columns : {1, 7, 64, 128}) {
    constexpr std::int64_t kRows = 1000;
    std::vector<std::int64_t> rows(kRows);
    for (std::int64_t& row : rows) row = static_cast<std::int64_t>(random() % kRows);
    rows[10] = -1;
    rows[20] = kRows;
    std::vector<std::uint32_t> values(static_cast<std::size_t>(kRows * columns));
    for (std::uint32_t& value : values) value = static_cast<std::uint32_t>(random());
    const DeviceMemory source(values);
    const DeviceMemory chosen(rows);
    DeviceMemory error(std::vector<std::uint32_t>{0});
    const DeviceMemory packed(aligned(values.size() * 4));
    PackedTensor tensor = dense({kRows, columns}, 4);
    tensor.address = source.address();
    tensor.rows = chosen.address();
    tensor.table_rows = kRows;
    const Stream stream;
    pack(check, {tensor}, packed, static_cast<std::uint32_t*>(error.get()), stream);
    stream.wait();
    const auto result = packed.values<std::uint32_t>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::int64_t row = rows[i / static_cast<std::size_t>(columns)];
      const bool known = row >= 0 && row < kRows;
      const std::size_t from =
          static_cast<std::size_t>(row * columns) + i % static_cast<std::size_t>(columns);
      if (result[i] != (known ? values[from] : 0)) why = "a gathered row differs";
    }
    if (error.values<std::uint32_t>()[0] != 1) why = "a row outside of the table is not reported";
  }
  check.report.check("gather rows", why);
}

struct Shape {
  const char* name;
  std::int64_t tensors;
  PackedTensor (*tensor)(std::int64_t bytes);
};

PackedTensor contiguous(std::int64_t bytes) { return dense({bytes / 4}, 4); }
PackedTensor to_bfloat16(std::int64_t bytes) {
  PackedTensor tensor = contiguous(bytes);
  tensor.cast = PackCast::float_to_bfloat16;
  return tensor;
}
// The left half of the columns of a matrix.
PackedTensor left_half(std::int64_t bytes) {
  PackedTensor tensor = dense({bytes / 4 / 256, 256}, 4);
  tensor.strides[0] = 512;
  return tensor;
}
PackedTensor transposed(std::int64_t bytes) {
  PackedTensor tensor = dense({1024, bytes / 4 / 1024}, 4);
  tensor.strides[0] = 1;
  tensor.strides[1] = 1024;
  return tensor;
}

void measure_shape(const KernelCheck& check, const Shape& shape) {
  Message message;
  const std::int64_t each = static_cast<std::int64_t>(check.bytes) / shape.tensors / 4096 * 4096;
  if (each == 0) return;
  for (std::int64_t i = 0; i < shape.tensors; ++i) message.add(shape.tensor(each), 0);
  const DeviceMemory memory(message.arena_bytes);
  const DeviceMemory packed(message.packed_bytes);
  check_cuda(cudaMemset(memory.get(), 1, memory.bytes()), "cudaMemset");
  const std::vector<PackedTensor> tensors = on_device(message, memory);
  const double bytes = static_cast<double>(message.packed_bytes) +
                       static_cast<double>(each) * static_cast<double>(shape.tensors);
  const Stream stream;
  const double packing =
      median_seconds(stream, check.rounds, [&] { pack(check, tensors, packed, nullptr, stream); });
  check.report.figure(std::string("pack ") + shape.name, bytes, packing);
  const double unpacking = median_seconds(stream, check.rounds,
                                          [&] { unpack(check, tensors, packed, nullptr, stream); });
  check.report.figure(std::string("unpack ") + shape.name, bytes, unpacking);
}

void measure_rows(const KernelCheck& check) {
  constexpr std::int64_t kColumns = 128;
  const std::int64_t rows = static_cast<std::int64_t>(check.bytes) / (kColumns * 4);
  if (rows == 0) return;
  std::mt19937_64 random(4);
  std::vector<std::int64_t> chosen(static_cast<std::size_t>(rows));
  for (std::int64_t& row : chosen)
    row = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
  PackedTensor tensor = dense({rows, kColumns}, 4);
  const std::uint64_t bytes = packed_size(tensor);
  const DeviceMemory table(bytes);
  check_cuda(cudaMemset(table.get(), 1, table.bytes()), "cudaMemset");
  const DeviceMemory packed(aligned(bytes));
  const DeviceMemory numbers(chosen);
  tensor.address = table.address();
  tensor.rows = numbers.address();
  tensor.table_rows = rows;
  const Stream stream;
  const double seconds =
      median_seconds(stream, check.rounds, [&] { pack(check, {tensor}, packed, nullptr, stream); });
  check.report.figure("gather random rows of 512 bytes",
                      2.0 * static_cast<double>(bytes) + 8.0 * static_cast<double>(rows), seconds);
}

}  // namespace

void check_pack(const KernelCheck& check) {
  check_random(check);
  check_many(check);
  check_rows(check);
}

void measure_pack(const KernelCheck& check) {
  const DeviceMemory from(check.bytes);
  const DeviceMemory to(check.bytes);
  check_cuda(cudaMemset(from.get(), 1, check.bytes), "cudaMemset");
  const Stream stream;
  const double copy = median_seconds(stream, check.rounds, [&] {
    check_cuda(
        cudaMemcpyAsync(to.get(), from.get(), check.bytes, cudaMemcpyDeviceToDevice, stream.get()),
        "copy within the device");
  });
  check.report.figure("copy within the device", 2.0 * static_cast<double>(check.bytes), copy);
  for (const Shape& shape : {Shape{"1 contiguous tensor", 1, contiguous},
                             Shape{"2000 contiguous tensors", 2000, contiguous},
                             Shape{"2000 tensors as bfloat16", 2000, to_bfloat16},
                             Shape{"100 tensors of half rows", 100, left_half},
                             Shape{"100 transposed tensors", 100, transposed}})
    measure_shape(check, shape);
  measure_rows(check);
}

}  // namespace stitch::transport::gpu
