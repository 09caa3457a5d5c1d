#pragma once

#include <memory>

namespace stitch::base {

// A thread makes a call and waits for the answer at once. Where others want the cores, a poller
// lets the answer wake that thread, and not a thread of its own that then wakes it: from the moment
// the request is written until the thread reads, or waits no longer, messages wake no other thread.
// Other messages wait for this thread, too, for a slice where it is preempted; it does nothing else
// meanwhile. Every method is about the calling thread.
class AnswerWait {
 public:
  // A poller, which reads the answer.
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

  // Whether this thread waits at once for the answers of the calls that it makes from now on.
  // Returns the former setting; an answer that is awaited is given up.
  static bool set(bool waits) noexcept;
  // This thread sends a request next, which does not wait for room any more.
  static void request_follows() noexcept;
  // Whether a request follows whose answer has no reader yet.
  [[nodiscard]] static bool of_request() noexcept;
  static void set_reader(std::shared_ptr<Reader> reader) noexcept;
  // This thread reads now. True when `reader` expected it, which it does no longer.
  [[nodiscard]] static bool ends_in(const Reader& reader) noexcept;
  // This thread does something else first.
  static void give_up() noexcept;
};

}  // namespace stitch::base
