/** What Everstep measures itself, beside what the script logs. */
import { expect, test } from 'vitest'

import { series, type Point, type Values } from '../src/model/metrics'
import { extremes, ownNames, scriptNames, titleOf } from '../src/model/ownMetrics'

const at = (step: number, moment: number, values: Values): Point => ({ step, firstStep: step, at: moment, values, least: values, most: values })
const points = [
  at(1, 10, { loss: 3, 'everstep/gpu_percent': 80, 'everstep/step_seconds': 2 }),
  at(2, 12, { loss: 2.5 }),
  at(3, 14, { 'everstep/step_seconds': 2.5, 'everstep/new_thing': 1 }),
]

test('what the script logs has a name of its own', () => expect(scriptNames(points)).toEqual(['loss']))
test('each of ours is a line, in a settled order; what is new comes last', () => expect(ownNames(points)).toEqual(['everstep/step_seconds', 'everstep/gpu_percent', 'everstep/new_thing']))
test('names that are not known stay as they are', () => expect([titleOf('everstep/step_seconds'), titleOf('everstep/x')]).toEqual(['Step time, seconds', 'everstep/x']))

test.each([
  ['everstep/gpu_percent', [12.34, 90.06, 97], ['12.3 %', '90.1 %', '97 %']],
  ['everstep/step_seconds', [1, 2.0049, 30], ['1 s', '2 s', '30 s']],
  ['everstep/memory_used_bytes', [0, 1536.4, 2048], ['0 B', '1.5 KiB', '2.0 KiB']],
  ['everstep/network_bytes_per_second', [0, 1536.4, 2048], ['0 B/s', '1.5 KiB/s', '2.0 KiB/s']],
])('which nodes stand out in %s', (name, [least, middle, most], told) => {
  const spread: Point = { step: 2, firstStep: 2, at: 1, values: { [name]: middle! }, least: { [name]: least! }, most: { [name]: most! }, leastOn: { [name]: 'i-a' }, mostOn: { [name]: 'i-b' } }
  const alone: Point = { ...spread, step: 3, leastOn: { [name]: '' }, mostOn: { [name]: '' } }
  const found = extremes(name, series([spread, alone], name, 'step'))
  expect(found).toEqual({ least: { node: 'i-a', value: told[0] }, median: told[1], most: { node: 'i-b', value: told[2] } })
  expect(extremes(name, series([alone], name, 'step'))).toBeUndefined()
})
