#include "stitch/rpc/calls.h"

namespace stitch::detail {
namespace {

// An exception of an argument's own serialize function is a mistake of the program.
ErrorCode code_of_writing(const std::exception_ptr& exception) noexcept {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error.code();
  } catch (...) {
    return ErrorCode::invalid_argument;
  }
}

}  // namespace

Error was_not_made(std::string_view function, const WorkerInfo& to,
                   const std::exception_ptr& exception) {
  const Error error = to_error(exception);
  return Error(code_of_writing(exception), "call " + std::string(function) + "() to " +
                                               to_string(to) + " was not made: " + error.what())
      .with_worker(to.name)
      .with_function(std::string(function));
}

template class CallState<void>;
template class CallState<at::Tensor>;
template class CallState<bool>;
template class CallState<int>;
template class CallState<std::int64_t>;
template class CallState<double>;
template class CallState<std::string>;

}  // namespace stitch::detail
