#pragma once

namespace stitch::transport {

// Has this thread go on at another processor of those it may use, and leaves what it may use as it
// was. False when there is no other one, or the system refuses.
//
// Why a thread would: when two threads that wait for each other by polling share a processor, each
// of them runs only while the other one gives way. Linux places a woken thread beside the one that
// woke it, looks for an idle processor only where it expects to find one soon (the SIS_UTIL
// heuristic of its scheduler, which with two processors hardly ever looks), and does not move what
// runs often. Such threads then stay together while another processor idles, and a round trip takes
// ten times as long. Thread contract: any thread.
bool leave_processor() noexcept;

}  // namespace stitch::transport
