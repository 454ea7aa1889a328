/** What an event renews. */
import { expect, test } from 'vitest'

import { renewed } from '../src/api/live'

const keys = (event: object) => renewed(event).map((key) => key.join('/'))

test('an event of a job renews that job and the lists, and no other job', () => {
  const found = keys({ TrainingJobName: 'gpt', FleetName: 'main' })
  expect(found).toEqual(expect.arrayContaining(['jobs', 'incidents', 'fleets', 'job/gpt', 'protection/gpt', 'events/gpt', 'events//main']))
  expect(found.filter((key) => key.startsWith('job/'))).toEqual(['job/gpt'])
})

test('an event of a fleet renews no job page', () => {
  expect(keys({ FleetName: 'main' }).filter((key) => key.startsWith('job/') || key.startsWith('protection'))).toEqual([])
})
