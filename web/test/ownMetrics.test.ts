/** What Everstep measures itself, beside what the script logs. */
import { expect, test } from 'vitest'

import type { Point, Values } from '../src/model/metrics'
import { ofScript, ownSeries, titleOf } from '../src/model/ownMetrics'

const at = (step: number, moment: number, values: Values): Point => ({ step, firstStep: step, at: moment, values, least: values, most: values })
const points = [
  at(1, 10, { loss: 3, 'everstep/gpu_percent': 80, 'everstep/step_seconds': 2 }),
  at(2, 12, { loss: 2.5 }),
  at(3, 14, { 'everstep/step_seconds': 2.5, 'everstep/new_thing': 1 }),
]

test('what the script logs has no points of ours', () => expect(ofScript(points)).toEqual([at(1, 10, { loss: 3 }), at(2, 12, { loss: 2.5 })]))
test('each of ours is a line over its own points, in a settled order; what is new comes last', () => {
  const own = ownSeries(points, 'step', [])
  expect(own.map((each) => each.name)).toEqual(['everstep/step_seconds', 'everstep/gpu_percent', 'everstep/new_thing'])
  const values = { 'everstep/step_seconds': [2, 2.5] }
  expect(own[0]!.series).toEqual({ names: ['everstep/step_seconds'], x: [1, 3], values, least: values, most: values })
})
test('a failure is a gap in ours, too', () => {
  const [first] = ownSeries(points, 'wall', [{ from: 13 }])
  expect(first!.series).toMatchObject({ x: [10, 13, 14], values: { 'everstep/step_seconds': [2, null, 2.5] } })
})
test('names that are not known stay as they are', () => expect([titleOf('everstep/step_seconds'), titleOf('everstep/x')]).toEqual(['Step time, seconds', 'everstep/x']))
