// CRC-32C (Castagnoli), as in iSCSI and ext4: with the CPU's instruction where it has one, otherwise by tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kt {

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc = 0);  // `crc`: of the bytes before
uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t crc = 0);
// The checksum of two parts one after the other, from those of each.
uint32_t crc32c_combine(uint32_t first, uint32_t second, size_t second_bytes);
bool has_crc32c_instruction();

}  // namespace kt
