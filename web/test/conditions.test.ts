import { expect, test } from 'vitest'
import { conditionLines } from '../src/model/conditions'

test('a condition names its node, and the service has none', () => {
  const lines = conditionLines([
    { Type: 'disk_full', Message: 'the disk of the control plane is full' },
    { Type: 'disk_full', Message: '/state takes no more data', NodeId: 'i-1' },
  ])
  expect(lines.map(({ title, text }) => [title, text])).toEqual([
    ['Disk full', 'The disk of the control plane is full.'],
    ['Disk full on i-1', '/state takes no more data.'],
  ])
  expect(new Set(lines.map((line) => line.key)).size).toBe(2)
})
test('an answer without conditions has no lines', () => expect(conditionLines(undefined)).toEqual([]))
