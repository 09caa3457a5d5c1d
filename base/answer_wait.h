#pragma once

#include <memory>

namespace stitch::base {

// A thread makes a call and waits for the answer at once. Where others want the cores, a poller
// lets the answer wake that thread, and not a thread of its own that then wakes it: from the moment
// the request is written until the thread reads, or waits no longer, messages wake no other thread:
// what else arrives waits for this one, for a slice where that is preempted. The thread does
// nothing else meanwhile. Everything here is of the calling thread.
class AnswerWait {
 public:
  // What is to read the answer, as a poller.
  class Reader {
   public:
    // The thread that was to read in it does not.
    virtual void answer_not_awaited() noexcept = 0;

   protected:
    Reader() = default;
    ~Reader() = default;
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
  };

  // Whether this thread waits at once for the answers of the calls that it makes from now on; what
  // held before. It gives up what it waits for.
  static bool set(bool waits) noexcept;
  // What this thread sends next is a request, which does not wait for room any more.
  static void request_follows() noexcept;
  // Whether that is to be noted, with the reader of its answer.
  [[nodiscard]] static bool of_request() noexcept;
  static void set_reader(std::shared_ptr<Reader> reader) noexcept;
  // This thread reads now. True when `reader` expected it, which it does no longer.
  [[nodiscard]] static bool ends_in(const Reader& reader) noexcept;
  // This thread does something else first.
  static void give_up() noexcept;
};

}  // namespace stitch::base
