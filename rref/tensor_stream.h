#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stitch::rref {

// A tensor that is stored for a parameter: the parameter itself (its field is ""), or a field of an
// optimizer's state. Element types have their names in safetensors files.
struct StoredTensor {
  std::string field, dtype;
  std::vector<std::int64_t> sizes;
};
struct StoredParameter {
  std::string name, dtype;
  std::vector<std::int64_t> sizes;
  std::vector<StoredTensor> tensors;

  // The name of a tensor in a file: "layer.weight", "layer.weight.exp_avg".
  [[nodiscard]] std::string name_of(const StoredTensor& tensor) const {
    return tensor.field.empty() ? name : name + '.' + tensor.field;
  }
  // "F32 [2, 3]", printable.
  [[nodiscard]] std::string text() const;
};

// The bytes of the tensors of a list of parameters, one behind the other, which workers exchange in
// pieces. A piece has whole parameters, or a part of one that is larger. Thread contract: constant.
class TensorStream {
 public:
  static constexpr std::uint64_t kPieceBytes = std::uint64_t{4} << 20;
  struct Piece {
    std::uint64_t begin, bytes;
  };
  // A part of one tensor in a piece.
  struct Slice {
    std::size_t parameter, tensor;
    std::uint64_t from;   // its first byte in the tensor
    std::uint64_t at;     // and in the piece
    std::uint64_t bytes;  // not zero
  };

  // Throws Error(invalid_argument) for types and sizes that no tensor has.
  explicit TensorStream(const std::vector<StoredParameter>& parameters);

  [[nodiscard]] std::uint64_t bytes() const { return begins_.back().back(); }
  [[nodiscard]] std::vector<Piece> pieces() const;
  // In order. Throws Error(out_of_range) for more than kPieceBytes, or what lies behind the end.
  [[nodiscard]] std::vector<Slice> slices(const Piece& piece) const;

 private:
  // Where the tensors of each parameter begin, and behind them its end; in the last one the end of
  // all.
  std::vector<std::vector<std::uint64_t>> begins_;
};

}  // namespace stitch::rref
