#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <utility>

#include "stitch/rref/files/file_tensors.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {

using ReadTensors = files::Tensors (*)(const files::FileBytes&);
using WriteTensors = void (*)(const files::Tensors&, const files::Sink&);

[[nodiscard]] inline base::Bytes file_of(const files::Tensors& tensors, WriteTensors write) {
  base::Bytes bytes;
  write(tensors, [&](const void* data, std::size_t size) { bytes.append(data, size); });
  return bytes;
}

// Reads a file and every byte of its tensors, and writes what it has and reads that again.
[[nodiscard]] inline bool reads(Bytes input, ReadTensors read, WriteTensors write) {
  return accepts({ErrorCode::invalid_argument}, [&] {
    // In memory of its own: what refers to it afterwards is found.
    const auto copy = std::make_shared<base::Bytes>(copy_of(input));
    const files::Tensors tensors = read({{copy->data(), copy->size()}, copy});
    std::size_t total = 0;
    for (const auto& [name, tensor] : tensors) {
      // An expanded tensor may have more elements than the file has bytes.
      if (tensor.numel() > (1 << 20) || (total += tensor.nbytes()) > (1 << 20)) return true;
    }
    files::expect_writable(tensors);
    const auto again = std::make_shared<base::Bytes>(file_of(tensors, write));
    const files::Tensors second = read({{again->data(), again->size()}, again});
    require(second.size() == tensors.size(), "tensors are lost");
    for (const auto& [name, tensor] : tensors) {
      const at::Tensor values = files::plain(tensor);
      const at::Tensor& found = second.at(name);
      const auto bytes = [](const at::Tensor& of) {
        return Bytes(static_cast<const std::byte*>(of.data_ptr()), of.nbytes());
      };
      require(found.scalar_type() == values.scalar_type() && found.sizes() == values.sizes() &&
                  same(bytes(found), bytes(values)),
              "a tensor, written again");
    }
    return true;
  });
}

[[nodiscard]] inline Seeds seeds_of_tensors(WriteTensors write) {
  Seeds seeds;
  const auto add = [&](const char* name, const files::Tensors& tensors) {
    seeds.push_back({name, file_of(tensors, write)});
  };
  add("none", {});
  add("one", {{"weight", at::ones({2, 3})}});
  add("types", {{"bool", at::ones({3}, at::kBool)},
                {"half", at::ones({1}, at::kHalf)},
                {"complex", at::ones({1}, at::kComplexFloat)},
                {"long", at::ones({2}, at::kLong)}});
  add("shapes", {{"number", at::ones({})}, {"none", at::empty({0, 3})}});
  return seeds;
}

}  // namespace stitch::fuzz
