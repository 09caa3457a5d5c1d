// TensorPipe by itself: messages of 64 bytes, and large buffers that both sides reuse. The only
// file of the benchmark that includes TensorPipe.
#include <tensorpipe/tensorpipe.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>

#include "measure.h"
#include "timing.h"

namespace stitch_bench {

namespace floors_tensorpipe_measure {
namespace {

namespace tp = ::tensorpipe;

constexpr std::size_t kPayload = 64;
// The first byte of a payload: the action of the other side.
constexpr char kEcho = 'e';
constexpr char kDrop = 'd';

std::shared_ptr<tp::Context> make_context(const std::string& transport) {
  auto context = std::make_shared<tp::Context>();
  context->registerTransport(
      0, transport,
      transport == "shm" ? tp::transport::shm::create() : tp::transport::uv::create());
  context->registerChannel(0, "basic", tp::channel::basic::create());
  return context;
}

// One end of a pipe. Messages are a payload of 64 bytes and at most one buffer, which is received
// into the same memory each time. Owned by a measure; read() and write() from any thread, one read
// at a time.
class Messages {
 public:
  explicit Messages(std::shared_ptr<tp::Pipe> pipe) : pipe_(std::move(pipe)) {}
  ~Messages() { pipe_->close(); }
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  using Done = std::function<void(bool)>;

  // Writes a payload that stays as it is (or changes in its first byte only when nothing is being
  // written).
  void write(char kind, std::vector<char>* buffer, Done done) {
    outgoing_[0] = kind;
    tp::Message message;
    message.payloads.push_back({outgoing_.data(), outgoing_.size(), ""});
    if (buffer != nullptr && !buffer->empty()) {
      tp::Message::Tensor tensor;
      tensor.buffer = tp::CpuBuffer{buffer->data()};
      tensor.length = buffer->size();
      message.tensors.push_back(std::move(tensor));
    }
    pipe_->write(std::move(message),
                 [done = std::move(done)](const tp::Error& error) { done(!error); });
  }
  // Reads into payload() and received(); `done` gets false when there is nothing more.
  void read(Done done) {
    pipe_->readDescriptor([this, done = std::move(done)](const tp::Error& error,
                                                         const tp::Descriptor& descriptor) {
      if (error || descriptor.payloads.size() != 1 || descriptor.payloads[0].length != kPayload) {
        done(false);
        return;
      }
      tp::Allocation allocation;
      allocation.payloads.push_back({incoming_.data()});
      received_.resize(descriptor.tensors.empty() ? 0 : descriptor.tensors[0].length);
      if (!received_.empty()) {
        tp::Allocation::Tensor tensor;
        tensor.buffer = tp::CpuBuffer{received_.data()};
        allocation.tensors.push_back(std::move(tensor));
      }
      pipe_->read(std::move(allocation),
                  [done](const tp::Error& read_error) { done(!read_error); });
    });
  }
  // Sends a message and waits for its echo on this thread.
  void round_trip(std::vector<char>* buffer) {
    std::promise<bool> answered;
    std::promise<bool> written;
    read([&](bool ok) { answered.set_value(ok); });
    write(kEcho, buffer, [&](bool ok) { written.set_value(ok); });
    const bool there = written.get_future().get();
    const bool back = answered.get_future().get();
    if (!there || !back) throw std::runtime_error("a TensorPipe pipe broke");
  }

  [[nodiscard]] char kind() const { return incoming_[0]; }
  [[nodiscard]] std::vector<char>& received() { return received_; }

 private:
  const std::shared_ptr<tp::Pipe> pipe_;
  std::vector<char> outgoing_ = std::vector<char>(kPayload, kEcho);
  std::vector<char> incoming_ = std::vector<char>(kPayload, 0);
  std::vector<char> received_;
};

// Rank 1: echoes or drops messages over one pipe of each transport until rank 0 closes it.
void echo_messages(const Side& side, const std::string& transport) {
  const auto context = make_context(transport);
  const auto listener = context->listen({transport == "shm" ? "shm://" : "uv://127.0.0.1"});
  std::promise<std::shared_ptr<tp::Pipe>> accepted;
  listener->accept([&](const tp::Error& error, std::shared_ptr<tp::Pipe> pipe) {
    accepted.set_value(error ? nullptr : std::move(pipe));
  });
  side.send_line(listener->url(transport));
  auto pipe = accepted.get_future().get();
  if (!pipe) throw std::runtime_error("TensorPipe accepted nothing");
  {
    Messages messages(std::move(pipe));
    std::promise<void> ended;
    const std::function<void()> next = [&] {
      messages.read([&](bool ok) {
        if (!ok) {
          ended.set_value();
          return;
        }
        // The other side sends the next buffer only after this one has been returned, so `received`
        // can be reused.
        if (messages.kind() == kEcho) messages.write(kEcho, &messages.received(), [](bool) {});
        next();
      });
    };
    next();
    ended.get_future().get();
  }
  listener->close();
  context->join();
}

// Runs `measure` over a new pipe of each transport.
void over_each_transport(const Side& side,
                         const std::function<void(Messages&, const std::string& key)>& measure) {
  for (const std::string transport : {"shm", "uv"}) {
    const auto context = make_context(transport);
    {
      Messages messages(context->connect(side.receive_line()));
      measure(messages, "floor.tensorpipe." + transport);
    }
    context->join();
  }
}

// Requests and replies driven by callbacks, `in_flight` at once. Returns round trips per second.
double calls_per_second(Messages& messages, std::size_t in_flight, double seconds) {
  std::promise<bool> ended;
  std::size_t calls = 0;
  std::size_t outstanding = in_flight;
  const auto end = after(seconds);
  // Only the reading callbacks, one at a time, touch the numbers.
  const std::function<void()> read_next = [&] {
    messages.read([&](bool ok) {
      ++calls;
      --outstanding;
      if (ok && Clock::now() < end) {
        ++outstanding;
        messages.write(kEcho, nullptr, [](bool) {});
      }
      if (!ok || outstanding == 0) {
        ended.set_value(ok);
      } else {
        read_next();
      }
    });
  };
  const auto start = Clock::now();
  for (std::size_t i = 0; i < in_flight; ++i) messages.write(kEcho, nullptr, [](bool) {});
  read_next();
  if (!ended.get_future().get()) throw std::runtime_error("a TensorPipe pipe broke");
  return static_cast<double>(calls) / seconds_since(start);
}

// Messages one way, `in_flight` not yet written at once, until the other side has them all.
double messages_per_second(Messages& messages, std::size_t in_flight, double seconds) {
  std::promise<void> ended;
  std::atomic<std::size_t> sent{0};
  std::atomic<std::size_t> running{in_flight};
  const auto end = after(seconds);
  const std::function<void()> write_next = [&] {
    ++sent;
    messages.write(kDrop, nullptr, [&](bool ok) {
      if (ok && Clock::now() < end) {
        write_next();
      } else if (--running == 0) {
        ended.set_value();
      }
    });
  };
  const auto start = Clock::now();
  for (std::size_t i = 0; i < in_flight; ++i) write_next();
  ended.get_future().get();
  messages.round_trip(nullptr);
  return static_cast<double>(sent) / seconds_since(start);
}

void first_latency(Side& side) {
  over_each_transport(side, [&](Messages& messages, const std::string& key) {
    report_latency(side, key + ".rtt64", time_each_us(side.settings().seconds, 20, [&] {
                     messages.round_trip(nullptr);
                   }));
  });
}

void first_rate(Side& side) {
  const double seconds = side.settings().seconds;
  over_each_transport(side, [&](Messages& messages, const std::string& key) {
    for (const std::size_t in_flight : {1, 16, 256}) {
      static_cast<void>(calls_per_second(messages, in_flight, seconds / 4));
      side.result(key + ".calls." + std::to_string(in_flight),
                  calls_per_second(messages, in_flight, seconds), "calls/s");
    }
    static_cast<void>(messages_per_second(messages, 16, seconds / 4));
    side.result(key + ".one_way", messages_per_second(messages, 16, seconds), "messages/s");
  });
}

void first_bandwidth(Side& side) {
  over_each_transport(side, [&](Messages& messages, const std::string& key) {
    for (const int mib : side.settings().sizes_mib) {
      std::vector<char> buffer(static_cast<std::size_t>(mib) << 20);
      for (std::size_t i = 0; i < buffer.size(); i += sizeof(std::uint64_t)) {
        const std::uint64_t mixed = (i + 1) * 0x9e3779b97f4a7c15ULL;
        std::memcpy(buffer.data() + i, &mixed, sizeof(mixed));
      }
      messages.round_trip(&buffer);
      if (messages.received() != buffer)
        throw std::runtime_error("TensorPipe changed a buffer on its way");
      const auto times = time_each_us(side.settings().seconds, least_repetitions(mib),
                                      [&] { messages.round_trip(&buffer); });
      side.result(key + ".echo." + std::to_string(mib) + "MiB",
                  2.0 * mib * kMiB / kGiB / (median(times) * 1e-6), "GiB/s");
    }
  });
}

void second(Side& side) {
  echo_messages(side, "shm");
  echo_messages(side, "uv");
}

}  // namespace
}  // namespace floors_tensorpipe_measure

Measure floor_tensorpipe_latency() {
  using namespace floors_tensorpipe_measure;
  return {.name = "floor-tensorpipe-latency",
          .about = "TensorPipe alone: 64 bytes back and forth, a thread waiting for each",
          .first = &first_latency,
          .second = &second};
}
Measure floor_tensorpipe_rate() {
  using namespace floors_tensorpipe_measure;
  return {.name = "floor-tensorpipe-rate",
          .about =
              "TensorPipe alone: 64 bytes and their echo, 1, 16 and 256 in flight from callbacks; "
              "64 bytes one way",
          .first = &first_rate,
          .second = &second};
}
Measure floor_tensorpipe_bandwidth() {
  using namespace floors_tensorpipe_measure;
  return {.name = "floor-tensorpipe-bandwidth",
          .about = "TensorPipe alone: echo of buffers that are used again",
          .first = &first_bandwidth,
          .second = &second};
}

}  // namespace stitch_bench
