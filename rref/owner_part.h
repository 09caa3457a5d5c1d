#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stitch/rref/checkpoint.h"
#include "stitch/rref/rref.h"
#include "stitch/rref/tensor_stream.h"

namespace stitch::rref {

// Parameters on their owner, of which a checkpoint stores tensors: a module's, or those of an
// optimizer, which have its state. Belongs to OwnerParts. Thread contract: any thread.
class StoredObject {
 public:
  using Fields = std::map<std::string, at::Tensor>;  // by StoredTensor::field
  virtual ~StoredObject() = default;

  // Each parameter once. They stay the same.
  [[nodiscard]] virtual std::vector<std::pair<std::string, at::Tensor>> parameters() const = 0;
  // The stored tensors of one of them: dense, on any device; they share memory with it or its
  // state. REQUIRES: its parameter_lock().
  [[nodiscard]] virtual Fields stored(std::size_t parameter) const = 0;
  // Throws Error(invalid_argument) when tensors of these types and sizes cannot be stored of it.
  virtual void check(std::size_t parameter, const std::vector<StoredTensor>& tensors) const = 0;
  // Makes `fields`, on any device, the current ones, and they become the former ones. Changes
  // nothing when it throws. REQUIRES: its parameter_lock().
  virtual void exchange(std::size_t parameter, Fields& fields) = 0;
  // The same with the options of all.
  virtual void exchange_options(CheckpointValues&) {}
};

// The part of a checkpoint that one owner has. The worker that saves or loads calls it through an
// RRef. The stream of list() is read in pieces; the stream that prepare() announces is
// written in pieces, and then taken. Thread contract: any thread.
class OwnerPart {
 public:
  explicit OwnerPart(std::shared_ptr<StoredObject> object);
  // Named tensors of this worker, which are stored themselves.
  explicit OwnerPart(const std::vector<std::pair<std::string, RRef<at::Tensor>>>& tensors);

  // The parameters in their order, as they were when this was made.
  [[nodiscard]] std::vector<StoredParameter> list() const;
  // These bytes of the stream, as they are now; steps of the same parameter wait. Throws
  // Error(invalid_argument) when a tensor has another type or shape than in list().
  [[nodiscard]] at::Tensor read(std::uint64_t begin, std::uint64_t bytes) const;

  // Checks tensors that are to replace those of all parameters, and makes room for them. Throws
  // Error(invalid_argument) naming a parameter that is missing or does not fit.
  void prepare(const std::vector<StoredParameter>& parameters, const CheckpointValues& options);
  // The next bytes of their stream: pieces may come in any order, each once.
  void write(std::uint64_t begin, const at::Tensor& bytes);
  // Makes them the current ones, all or none.
  void take();
  // Makes the former ones current again, if they were taken, and forgets the new ones.
  void take_back();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Whether a tensor of a peer is a piece: plain bytes on the CPU.
[[nodiscard]] bool is_piece(const at::Tensor& tensor);
// The bytes of a slice of a tensor.
void copy_slice(const at::Tensor& tensor, const TensorStream::Slice& slice, void* to);

}  // namespace stitch::rref
