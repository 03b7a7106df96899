// What the codecs' checks say of operands of several devices: error_of(x, payload, error, flag),
// each the number of a device or -1 for the CPU, is null or the text that is thrown.
#include "../../../csrc/host/communication/codec_ops.h"

namespace pyops {

int dtype_code(const Tensor&) { return FP32; }
std::ostream& operator<<(std::ostream& text, const Shape&) { return text; }

}  // namespace pyops

extern "C" const char* error_of(int x, int payload, int error, int flag, int rows) {
    using namespace pyops;
    static std::string text;
    const CodecCheck check("onebit_encode_", true, ONEBIT);
    const int64_t bytes = check.bytes(64, 64);
    const Tensor target{payload, bytes};
    const OptionalTensor left = Tensor{error, 64}, seen = Tensor{flag, 1};
    try {
        if (rows < 0) {
            encode_span(check, target, Tensor{x, 64}, left, seen, {64, "l1"});
        } else {
            std::vector<const uint8_t*> at;
            const Tensors sources{Tensor{x, bytes}, Tensor{rows, bytes}};
            check.payloads(sources, bytes);
            target_of(check, target, left, seen, 64, {64, "l1"});
        }
    } catch (const std::exception& thrown) {
        return (text = thrown.what()).c_str();
    }
    return nullptr;
}
