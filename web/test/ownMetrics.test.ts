/** What Everstep measures itself, beside what the script logs. */
import { expect, test } from 'vitest'

import type { Point } from '../src/model/metrics'
import { ofScript, ownSeries, titleOf } from '../src/model/ownMetrics'

const points: Point[] = [
  { step: 1, at: 10, values: { loss: 3, 'everstep/gpu_percent': 80, 'everstep/step_seconds': 2 } },
  { step: 2, at: 12, values: { loss: 2.5 } },
  { step: 3, at: 14, values: { 'everstep/step_seconds': 2.5, 'everstep/new_thing': 1 } },
]

test('what the script logs has no points of ours', () => expect(ofScript(points)).toEqual([{ step: 1, at: 10, values: { loss: 3 } }, { step: 2, at: 12, values: { loss: 2.5 } }]))
test('each of ours is a line over its own points, in a settled order; what is new comes last', () => {
  const own = ownSeries(points, 'step', [])
  expect(own.map((each) => each.name)).toEqual(['everstep/step_seconds', 'everstep/gpu_percent', 'everstep/new_thing'])
  expect(own[0]!.series).toEqual({ names: ['everstep/step_seconds'], x: [1, 3], values: { 'everstep/step_seconds': [2, 2.5] } })
})
test('a failure is a gap in ours, too', () => {
  const [first] = ownSeries(points, 'wall', [{ from: 13 }])
  expect(first!.series).toMatchObject({ x: [10, 13, 14], values: { 'everstep/step_seconds': [2, null, 2.5] } })
})
test('names that are not known stay as they are', () => expect([titleOf('everstep/step_seconds'), titleOf('everstep/x')]).toEqual(['Step time, seconds', 'everstep/x']))
