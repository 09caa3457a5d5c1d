#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>

namespace stitch::testing {

// A tensor of random bits of each type that files have and this libtorch has, by the type's name.
// `pt`: of the format .pt, else of .safetensors.
[[nodiscard]] inline std::map<std::string, at::Tensor> every_type(bool pt) {
  std::set<std::string> types{"Double",
                              "Float",
                              "Half",
                              "BFloat16",
                              "ComplexFloat",
                              "Long",
                              "Int",
                              "Short",
                              "Char",
                              "Byte",
                              "Bool",
                              "UInt64",
                              "UInt32",
                              "UInt16",
                              "Float8_e5m2",
                              "Float8_e4m3fn",
                              "Float8_e5m2fnuz",
                              "Float8_e4m3fnuz"};
  types.insert(pt ? "ComplexDouble" : "Float8_e8m0fnu");
  std::map<std::string, at::Tensor> tensors;
  std::mt19937 random(1);
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<at::ScalarType>(i);
    if (!types.contains(c10::toString(type))) continue;
    at::Tensor tensor = at::empty({3, 5}, at::TensorOptions(type));
    auto* const bytes = static_cast<unsigned char*>(tensor.data_ptr());
    for (std::size_t k = 0; k < tensor.nbytes(); ++k)
      bytes[k] = static_cast<unsigned char>(random() & (type == at::kBool ? 1 : 255));
    tensors.emplace(c10::toString(type), tensor);
  }
  return tensors;
}

// Whether both have the same names, types, sizes and bits.
[[nodiscard]] inline ::testing::AssertionResult same_bits(
    const std::map<std::string, at::Tensor>& one, const std::map<std::string, at::Tensor>& other) {
  if (one.size() != other.size())
    return ::testing::AssertionFailure() << one.size() << " and " << other.size() << " tensors";
  for (const auto& [name, tensor] : one) {
    const auto found = other.find(name);
    if (found == other.end()) return ::testing::AssertionFailure() << name << " is missing";
    const at::Tensor a = tensor.contiguous();
    const at::Tensor b = found->second.contiguous();
    if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes() ||
        std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) != 0)
      return ::testing::AssertionFailure() << name << " has changed";
  }
  return ::testing::AssertionSuccess();
}

}  // namespace stitch::testing
