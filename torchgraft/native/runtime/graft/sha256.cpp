// SHA-256 (FIPS 180-4), with the processor's own instructions where it has them.
#include <array>
#include <cstring>

#include "graft/archive.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchgraft {
namespace {

alignas(16) constexpr uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

void plain(State& state, const unsigned char* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = uint32_t{data[4 * i]} << 24 | uint32_t{data[4 * i + 1]} << 16 |
          uint32_t{data[4 * i + 2]} << 8 | data[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
          (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    State s = state;
    for (int i = 0; i < 64; ++i) {
      const uint32_t one = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) +
          ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[i] + w[i];
      const uint32_t two = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) +
          ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      s = {one + two, s[0], s[1], s[2], s[3] + one, s[4], s[5], s[6]};
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
}

#if defined(__x86_64__)
__attribute__((target("sha,sse4.1"))) void fast(
    State& state, const unsigned char* data, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  // The instructions want the words of the state as ABEF and CDGH.
  __m128i low = _mm_shuffle_epi32(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(&state[0])), 0xB1);
  __m128i high = _mm_shuffle_epi32(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(&state[4])), 0x1B);
  __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
  for (; blocks > 0; --blocks, data += 64) {
    const __m128i abef0 = abef, cdgh0 = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), swap);
    for (int i = 0; i < 16; ++i) {
      if (i >= 4) {
        __m128i next = _mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]);
        next = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4));
        w[i % 4] = _mm_sha256msg2_epu32(next, w[(i + 3) % 4]);
      }
      __m128i sum = _mm_add_epi32(
          w[i % 4], _mm_load_si128(reinterpret_cast<const __m128i*>(&K[4 * i])));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef0);
    cdgh = _mm_add_epi32(cdgh, cdgh0);
  }
  low = _mm_shuffle_epi32(abef, 0x1B);
  high = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[0]), _mm_blend_epi16(low, high, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[4]), _mm_alignr_epi8(high, low, 8));
}
#endif

void blocks(State& state, const unsigned char* data, size_t count) {
#if defined(__x86_64__)
  static const bool has = [] {
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (b >> 29 & 1) != 0;
  }();
  if (has) return fast(state, data, count);
#endif
  plain(state, data, count);
}

}  // namespace

std::string sha256(std::string_view data) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* bytes = reinterpret_cast<const unsigned char*>(data.data());
  const size_t whole = data.size() / 64, rest = data.size() % 64;
  blocks(state, bytes, whole);
  unsigned char tail[128] = {};
  if (rest) std::memcpy(tail, bytes + 64 * whole, rest);
  tail[rest] = 0x80;
  const size_t last = rest < 56 ? 1 : 2;
  for (int i = 0; i < 8; ++i)
    tail[64 * last - 1 - i] = static_cast<unsigned char>((uint64_t{data.size()} * 8) >> (8 * i));
  blocks(state, tail, last);
  std::string hex;
  for (uint32_t word : state)
    for (int shift = 28; shift >= 0; shift -= 4) hex += "0123456789abcdef"[word >> shift & 15];
  return hex;
}

}  // namespace torchgraft
